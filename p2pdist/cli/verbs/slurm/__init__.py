"""`p2pdist slurm`: packages for the jobs of a Slurm cluster."""

from __future__ import annotations

import click

from p2pdist.cli.verbs.slurm.epilog import epilog
from p2pdist.cli.verbs.slurm.place import place
from p2pdist.cli.verbs.slurm.prolog import prolog
from p2pdist.cli.verbs.slurm.sweep import sweep


@click.group("slurm")
def command() -> None:
    """Bring packages to the nodes of a Slurm job before it starts, and place jobs where their
    packages are.

    A job names its packages in its comment, as in `sbatch --comment
    "p2pdist:team/trainer:v3,team/weights:v7"`.

    \b
    Example:
      p2pdist slurm place team/trainer:v3 --count 4
    """


for _verb in (prolog, epilog, place, sweep):
    command.add_command(_verb)
