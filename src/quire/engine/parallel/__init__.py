"""One model computed by several processes, the ranks, which divide its layers or its cache among them."""
