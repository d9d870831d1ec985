"""The command line: `headrace train | eval | merge | doctor`, one module per command.

app.py      the commands by name, --version, how errors become a panel and an exit code
train.py    train from a YAML file and --field value flags
evaluate.py loss, perplexity, accuracy, exact match of a model or adapter
merge.py    an adapter folded into its base
shard.py    where every parameter lies on a mesh, and why
memory.py   bytes of a device by cause, from the compiled step
doctor.py   what this machine has, and what will not work on it

Exit codes: 0 done, 1 the run failed, 2 what was asked for is wrong, 130 stopped with Ctrl-C.
Commands import torch and jax inside their functions, so that `headrace --help` answers at once.
"""

from headrace.cli.app import main

__all__ = ["main"]
