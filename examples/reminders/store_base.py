"""Round the pretrained weights to bfloat16 and store them as the base model that ships here.

python examples/reminders/store_base.py --trained out/pretrained --out examples/reminders/base
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LARGEST_BYTES = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.trained, dtype=torch.bfloat16)
    model.config.name_or_path = ""  # the folder it was trained in means nothing elsewhere
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.trained).save_pretrained(args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    if size > LARGEST_BYTES:
        raise SystemExit(f"{args.out} has {size:,} bytes; {LARGEST_BYTES:,} is the most")
    print(f"{args.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
