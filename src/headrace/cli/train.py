"""`headrace train config.yaml --field value`: fine-tune a model.

Knows: how words become a configuration. Does not know: how training works (`headrace.train`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.settings import read_settings, show_reference, show_settings


def train(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the settings, then stop.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting with its default, then stop.")
    ] = False,
) -> None:
    """Fine-tune a model: headrace train config.yaml --learning_rate 1e-4

    Every setting can stand in the YAML file or be given as --name value; flags win. Names are those
    of transformers and TRL; --settings lists them all. A wrong name or value is reported before
    anything is loaded, together with all the others.
    """
    if settings:
        show_reference()
        return
    resolved = read_settings(context.args)
    show_settings(resolved)
    if dry_run:
        return
    from headrace.plan.guard import check_fits

    check_fits(resolved.config)
    from headrace.train.trainer import Trainer

    Trainer(args=resolved.config).train()
