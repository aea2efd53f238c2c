"""One model computed by several processes, the ranks, each of which has a part of every layer."""
