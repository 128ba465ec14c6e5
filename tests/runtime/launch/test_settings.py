"""Every setting has its name, default and help once: functions and the command line agree with the dataclasses of options.py."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from dataclasses import MISSING, fields

import msgspec
import pytest

from penstock.commands.parser import command_line
from penstock.runtime.job.job import Job
from penstock.runtime.job.job import open as open_job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.options import JobOptions, OpenOptions, RunOptions
from penstock.runtime.launch.preflight import job_options
from penstock.runtime.messages.control import DataSpec, Setup
from penstock.runtime.worker.executor import Conduct
from penstock.support.settings import flags_of, problems_of, settings_of


def parameters(function):
    """The keywords of a function with their defaults."""
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY}


def defaults(options):
    return {field.name: field.default for field in fields(options) if field.default is not MISSING}


@pytest.mark.parametrize(
    ("function", "options"), [(run_bundle, RunOptions), (open_job, OpenOptions), (Job.__init__, JobOptions)]
)
def test_functions_take_the_settings_of_their_options(function, options):
    assert parameters(function) == defaults(options)


def run_parser() -> ArgumentParser:
    return next(action for action in command_line()._actions if action.dest == "command").choices["run"]


def test_the_command_line_has_the_settings_of_a_run():
    actions = {flag: action for action in run_parser()._actions for flag in action.option_strings}
    described = settings_of(RunOptions)
    flagged = {flag: name for name, about in described.items() for flag in flags_of(name, about)}
    assert flagged.keys() == actions.keys() - {"-h", "--help", "--help-all", "-v", "--verbose", "-q", "--quiet"}
    for flag, name in flagged.items():
        setting, action, default = described[name], actions[flag], defaults(RunOptions)[name]
        assert action.help == setting.help, flag
        assert action.metavar == setting.shown, flag
        assert tuple(action.choices or ()) == setting.choices, flag
        assert (tuple(action.default) if isinstance(action.default, list) else action.default) == default, flag


def test_options_of_a_run_travel_as_they_are():
    options = RunOptions(bundle="/b", steps=3, log=("wandb:x",), rate="constant", keep_last=2, checkpoint="/c")
    assert msgspec.json.decode(msgspec.json.encode(options), type=RunOptions) == options


def test_ranks_and_executors_default_to_what_jobs_do():
    job = defaults(JobOptions)
    setup = Setup("bundle", 1.0)
    for name in ("data", "audit", "retire", "trace", "latency", "prefetch", "nan", "evaluation"):
        assert getattr(setup, name) == job[name], name
    for name in ("audit", "retire", "trace", "pace"):
        assert getattr(Conduct(), name) == job[name], name


def test_open_makes_the_options_of_a_job(tmp_path):
    given = OpenOptions(data=str(tmp_path / "a.npz"), shuffle=True, seed=3, eval_data="synthetic", queue=7, lr=0.5)
    made = job_options(given)
    assert (made.data, made.evaluation) == (DataSpec(str(tmp_path / "a.npz"), True, 3), DataSpec())
    assert (made.queue, made.lr, made.timeout, made.trace) == (7, 0.5, given.timeout, False)
    assert job_options(OpenOptions()) == JobOptions()


def test_a_setting_says_what_it_needs():
    found = problems_of(RunOptions(bundle="b", keep_last=0, eval_every=1, checkpoint_wait=True))
    assert found == [
        "--keep-last needs --checkpoint DIR",
        "--keep-last must be 1 to 1000000000000, got 0",
        "--checkpoint-wait needs --checkpoint DIR",
        "--eval-every needs --eval-data FILE",
    ]
    assert problems_of(RunOptions(bundle="b", keep_last=1, eval_every=1, checkpoint="c", eval_data="d")) == []
