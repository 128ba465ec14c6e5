"""Tests that a setting is defined once: the facade, the planner and the flags have the names and defaults of the
dataclasses of settings."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import dataclass, fields

import pytest

import penstock as ps
from penstock.commands.arguments import add_settings, settings_from
from penstock.commands.compiling import demo
from penstock.commands.inspecting import inspect as inspecting
from penstock.commands.inspecting import verify
from penstock.commands.running import doctor, infer, simulate
from penstock.planning.options import BuildOptions, PlanOptions, ReadingOptions, SearchOptions, TrainingOptions
from penstock.runtime.launch.options import RunOptions
from penstock.support.settings import POSITIVE, SEED, WHOLE, defaults_of, given, required, setting, settings_of

VERBS = {ps.plan: PlanOptions, ps.plan_best: SearchOptions, ps.compile: BuildOptions}
KINDS = (
    *VERBS.values(),
    ReadingOptions,
    TrainingOptions,
    RunOptions,
    demo.DemoOptions,
    doctor.DoctorOptions,
    infer.InferOptions,
    inspecting.InspectOptions,
    simulate.SimulateOptions,
    verify.VerifyOptions,
    verify.BisectOptions,
    verify.ParityOptions,
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_the_facade_has_the_names_and_defaults_of_the_settings(verb):
    told = {
        name: given.default
        for name, given in inspect.signature(verb).parameters.items()
        if given.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("dump", "progress")
    }
    settings = {field.name: field.default for field in fields(VERBS[verb])}
    further = (
        {"cuda_libraries", "wire", "offload", "spill", "update_on", "mesh", "shard"} if verb is ps.plan_best else set()
    )
    assert {name: default for name, default in settings.items() if name not in further} == {
        name: settings[name] if default is inspect.Parameter.empty else default for name, default in told.items()
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_flags_that_are_not_given_are_the_defaults(kind):
    parser = argparse.ArgumentParser()
    add_settings(parser, kind)
    needed = [name for name in settings_of(kind) if name not in defaults_of(kind)]
    words = [word for name in needed for word in (f"--{name}", "1")]
    known = {"bundle": "b"} if kind in (infer.InferOptions, RunOptions) else {}
    found = settings_from(kind, parser.parse_args(words), **known)
    defaults = defaults_of(kind)
    assert {name: getattr(found, name) or None for name in defaults} == {k: v or None for k, v in defaults.items()}


def test_settings_that_are_shared_are_the_same():
    """But for the default of `replicas`, which is no limit where the planner chooses."""
    plan, search = settings_of(PlanOptions), settings_of(SearchOptions)
    both = plan.keys() & search.keys()
    elsewhere, split = {"offload", "spill", "update_on"}, {"mesh", "shard"}
    assert both == {"recompute", "replicas", "precision", "cuda_libraries", "wire", "zero", *elsewhere, *split}
    assert all(plan[name] is search[name] for name in both)
    differing = {name for name in both if defaults_of(PlanOptions)[name] != defaults_of(SearchOptions)[name]}
    assert differing == {"replicas"}


def test_checks_take_decimal_digits_alone():
    for check, right, wrong in (
        (POSITIVE, {"1": 1, "2147483647": 2**31 - 1}, ("0", "-1", "+1", " 1", "1_0", "٣", "2147483648", "x", "")),
        (WHOLE, {"0": 0, "7": 7}, ("00", "-0", "x")),
        (SEED, {"0": 0, "00": 0, str(2**63 - 1): 2**63 - 1}, ("-1", str(2**63), "1.5")),
    ):
        assert {text: check.read(text) for text in right} == right
        for text in wrong:
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                check.read(text)


def test_a_field_that_no_user_sets_is_no_setting():
    """The control: of these three fields two are settings, one of them without a default."""

    class Some:
        one: int = setting(1)
        two: int = required()
        three: int = 3

    kind = dataclass(frozen=True, kw_only=True)(Some)
    assert (list(settings_of(kind)), defaults_of(kind)) == (["one", "two"], {"one": 1})


def test_flags_that_were_given_are_known():
    assert given(TrainingOptions()) == []
    assert given(TrainingOptions(lr=0.0, group=["a{}"], skip_nonfinite=True)) == ["--lr", "--group", "--skip-nonfinite"]
    assert given(RunOptions(bundle="b", last="drop")) == ["--last-batch"]
