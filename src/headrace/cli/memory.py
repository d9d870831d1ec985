"""`headrace memory config.yaml`: what a device needs, by cause, before anything is trained.

Builds the run on the devices that are here, with data and weights, and compiles its longest step.
For devices that are not here see `headrace plan`.
"""

from __future__ import annotations

import typer

from headrace.cli.settings import read_settings, show_settings


def memory(context: typer.Context) -> None:
    """Bytes of a device by cause, from the compiled step: headrace memory config.yaml --name value

    Takes the settings of `headrace train`; trains and writes nothing.
    """
    resolved = read_settings(context.args)
    show_settings(resolved)
    from headrace.train.trainer import Trainer

    for line in Trainer(args=resolved.config).memory():
        typer.echo(line)
