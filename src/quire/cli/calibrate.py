"""quire calibrate: measure the scales of an fp8 cache."""

from __future__ import annotations

import argparse
import sys

from quire.cli.generate import read_prompts
from quire.cli.loading import engine_config, loading


def run(args: argparse.Namespace) -> int:
    texts = read_prompts(args)
    with loading():
        from quire.engine.calibrate import calibrate

    scales = calibrate(args.model, texts, args.output, engine_config(args))
    k_scales, v_scales = zip(*scales, strict=True)
    ranges = f"keys {min(k_scales):.3g} to {max(k_scales):.3g}, values {min(v_scales):.3g} to {max(v_scales):.3g}"
    print(f"quire: {args.output} has the scales of {len(scales)} layers: {ranges}", file=sys.stderr)
    return 0
