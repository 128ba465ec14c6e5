"""`penstock run`: train with a bundle."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from penstock.commands.arguments import add_settings
from penstock.runtime.launch import options
from penstock.support.settings import settings_of

# The subjects of the help, and the settings of each; evaluation belongs to the data.
_SUBJECTS: dict[str, tuple[type, ...]] = {
    "data and length": (options.SampleOptions, options.LengthOptions),
    "learning rate": (options.RateOptions,),
    "checkpoints": (options.CheckpointOptions,),
    "failures": (options.DeadlineOptions, options.FailureOptions),
    "what a run shows": (options.TelemetryOptions,),
    "groups of hosts": (options.GroupOptions,),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bundle, and the settings of a run by subject."""
    parser.add_argument("bundle", metavar="BUNDLE")
    for title, kinds in _SUBJECTS.items():
        group = parser.add_argument_group(title)
        for kind in kinds:
            add_settings(group, options.RunOptions, *settings_of(kind))
        if options.SampleOptions in kinds:
            add_settings(group, options.RunOptions, "eval_every")


def run(arguments: Namespace) -> None:
    """Train, or join a group as one rank."""
    from penstock.runtime.job.run import run_bundle  # lazy: heavy

    run_bundle(arguments.bundle, **{name: getattr(arguments, name) for name in settings_of(options.RunOptions)})
