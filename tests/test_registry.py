"""From names to classes, with a third-party package that is really installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from waiting import NEVER

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.methods.vade import Vade
from rl_plugins.runtime import registry
from rl_plugins.runtime.preflight import render_table
from rl_plugins.runtime.stack import build_stack

ROOT = Path(__file__).parents[1]


def refused(methods, method_params=None) -> str:
    with pytest.raises(ConfigError) as e:
        build_stack(methods, method_params)
    return str(e.value)


def python(code: str, path: Path | None = None) -> str:
    paths = [str(ROOT), *([str(path)] if path else [])]
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=NEVER,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# ---- discovery


def test_installed_methods_and_bundles_are_found_and_work(plugins):
    names = registry.all_names()
    assert {"dummy_scale", "dummy_shift", "dummy_both", "dummy_broken", "mc_grpo", "vade"} <= set(names)
    assert names == sorted(names)
    (origin,) = registry.origins_of("dummy_scale")
    assert (origin.distribution, origin.where) == ("rl-plugins-dummy", "rl_plugins_dummy.good:DummyScale")
    stack = build_stack("dummy_scale", {"dummy_scale": {"factor": "1e-1"}})
    assert type(stack.methods[0]).__module__ == "rl_plugins_dummy.good" and stack.methods[0].params.factor == 0.1


def test_without_the_package_its_names_are_unknown():
    assert "dummy_scale" not in registry.all_names()
    assert "There is no method `dummy_scale`." in refused("dummy_scale")


def test_a_name_loads_its_own_module_only(plugin_path):
    code = (
        "import json, sys; from rl_plugins.runtime import registry; before = registry.all_names();"
        "registry.load('dummy_scale');"
        "print(json.dumps([len(before), sorted(m for m in sys.modules if m.startswith('rl_plugins_dummy'))]))"
    )
    number, modules = json.loads(python(code, plugin_path))
    assert number > 8
    assert modules == ["rl_plugins_dummy", "rl_plugins_dummy.good"]  # not the broken one, nor the others


def test_importing_the_package_is_cheap(plugin_path):
    code = (
        "import sys; import importlib.metadata as m\n"
        "def scan(**kwargs): raise AssertionError('entry points were scanned')\n"
        "m.entry_points = scan\n"
        "import rl_plugins\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'numpy', 'torch', 'trl', 'verl', 'transformers'}))\n"
        "print(sorted(n for n in sys.modules if n.startswith('rl_plugins')))\n"
        "from rl_plugins import Method, MethodParams, param, Bundle\n"  # what a plugin imports at its top
        "print('torch' in sys.modules)"
    )
    assert python(code, plugin_path).splitlines() == ["[]", "['rl_plugins']", "False"]


def test_every_name_of_the_package_can_be_imported():
    import rl_plugins

    assert all(getattr(rl_plugins, name) is not None for name in rl_plugins.__all__)


def test_every_built_in_method_loads_and_is_named_after_its_file():
    for name in registry.all_names():
        found = registry.load(name)
        assert isinstance(found, Bundle) or issubclass(found, Method)
        assert found.name == name and registry.origins_of(name)[0].distribution == ""


# ---- what is broken stays where it is


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dummy_broken", "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"),
        ("dummy_missing", "AttributeError: module 'rl_plugins_dummy.good' has no attribute 'NoSuchClass'"),
        ("dummy_misfit", "`advantage` is no hook. Did you mean `advantages`?"),
    ],
)
def test_a_broken_method_is_refused_by_name_and_disturbs_no_other(plugins, name, reason):
    message = refused(["dummy_scale", name])
    assert name in message and "rl-plugins-dummy" in message and reason in message
    assert build_stack(["dummy_scale", "vade"]).names == ["dummy_scale", "vade"]


def test_a_built_in_file_that_cannot_be_imported_disturbs_no_other(monkeypatch):
    member = registry._member

    def broken(name):
        if name == "vade":
            raise ImportError("half written")
        return member(name)

    monkeypatch.setattr(registry, "_member", broken)
    assert {"vade", "mc_grpo"} <= set(registry.all_names())
    assert build_stack("mc_grpo").names == ["mc_grpo"]
    assert "`vade` from `rl_plugins.methods.vade` of rl-plugins cannot be loaded: ImportError: half written" in refused(
        "vade"
    )


def test_a_method_that_imports_a_module_that_moved_is_told_where_names_are(monkeypatch):
    def old(name):
        import rl_plugins.method  # noqa: F401

    monkeypatch.setattr(registry, "_member", old)
    assert "No module named 'rl_plugins.method'" in refused("vade") and "CHANGELOG.md" in refused("vade")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "other"}, "its class says name = 'other', it is registered as 'mine'"),
        ({"fidelity": "exact"}, "`fidelity` is 'exact'; it must be one of code, paper, abstract, reconstruction, own."),
        ({"Params": dict}, "`Params` must be a frozen dataclass"),
        ({"advantages": lambda self: None}, "`advantages(self)` must take (self, rollouts)"),
        ({"start": lambda self: None}, "`start(self)` must take (self, run)"),
        ({"observ": lambda self: None}, "`observ` is no hook. Did you mean `observe`?"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(change, reason):
    good = {"name": "mine", "fidelity": "paper", "observe": lambda self, r, t, s: None}
    registry.check_class(type("Mine", (Method,), good), "mine", "here")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        registry.check_class(type("Mine", (Method,), {**good, **change}), "mine", "here")
    with pytest.raises(ConfigError, match="lower-case letters"):
        registry.check_class(type("Mine", (Method,), {**good, "name": "Mine-1"}), "Mine-1", "here")
    with pytest.raises(ConfigError, match="not a subclass"):
        registry.check_class(print, "mine", "here")


# ---- two origins, vetoes


def test_a_name_with_two_origins_shows_both_and_how_to_choose(plugins):
    message = refused("mc_grpo")
    assert "`rl_plugins.methods.mc_grpo` of rl-plugins" in message
    assert "`rl_plugins_dummy.clash:McGrpo` of the package rl-plugins-dummy" in message
    assert '"-dist:rl-plugins-dummy"' in message and "RL_PLUGINS_VETO=dist:rl-plugins-dummy" in message


def test_a_veto_of_the_package_in_the_config_leaves_the_built_in(plugins):
    for spelling in ("-dist:rl-plugins-dummy", "-dist:RL_Plugins.Dummy"):
        assert type(build_stack(["mc_grpo", spelling]).methods[0]) is McGrpo
    assert "rl-plugins-dummy, which is vetoed" in refused(["dummy_scale", "-dist:rl-plugins-dummy"])


def test_a_veto_in_the_environment(plugins, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_VETO", "dist:rl-plugins-dummy, vade")
    assert type(build_stack("mc_grpo").methods[0]) is McGrpo
    assert "which is vetoed" in refused("dummy_both")
    assert "`vade` is vetoed by the environment variable RL_PLUGINS_VETO='dist:rl-plugins-dummy, vade'" in refused(
        "vade"
    )


def test_a_veto_in_the_environment_covers_the_parts_of_bundles(plugins, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_VETO", "dummy_shift")
    assert "`dummy_shift` is vetoed" in refused("dummy_both")
    assert build_stack(["dummy_both", "-dummy_shift"]).names == ["dummy_scale"]


# ---- bundles


def test_a_bundle_expands_in_its_place_with_the_settings_of_its_paper(plugins):
    stack = build_stack(["vade", "dummy_both"], {"dummy_shift": {"shift": -1}})
    assert stack.names == ["vade", "dummy_scale", "dummy_shift"]
    assert [m.params.factor for m in stack.methods[1:2]] == [3.0] and stack.methods[2].params.shift == -1.0
    assert stack.bundle_of == {"dummy_scale": "dummy_both", "dummy_shift": "dummy_both"}
    assert "dummy_scale (dummy_both)" in render_table(stack, {}), "the table says which bundle brought a method"


def test_parameters_of_a_user_go_before_those_of_the_bundle(plugins):
    assert build_stack("dummy_both", {"dummy_scale": {"factor": 5}}).methods[0].params.factor == 5.0


@pytest.mark.parametrize("methods", [["dummy_both", "dummy_shift"], ["dummy_shift", "dummy_both"]])
def test_a_part_beside_its_bundle_is_refused(plugins, methods):
    message = refused(methods)
    assert "names `dummy_shift` twice" in message and "part of the bundle `dummy_both`" in message
    assert "method_params.dummy_shift" in message


def test_parameters_under_the_name_of_a_bundle_are_refused(plugins):
    message = refused("dummy_both", {"dummy_both": {"factor": 1}})
    assert "give them under the names of its parts: `dummy_scale`, `dummy_shift`" in message


def test_parts_can_be_taken_out_of_a_bundle_but_not_without_effect(plugins):
    assert build_stack(["dummy_both", "-dummy_scale"]).names == ["dummy_shift"]
    assert "nothing of it is left" in refused(["dummy_both", "-dummy_scale", "-dummy_shift"])
    assert "nothing of it is left" in refused(["vade", "-vade"])
    assert "no bundle that is named brings it" in refused(["dummy_both", "-vade"])
    assert "not among the methods of this run" in refused(["dummy_both", "-dummy_shift"], {"dummy_shift": {"shift": 1}})


# ---- names and parameters as users write them


@pytest.mark.parametrize(
    ("written", "names"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("vade", ["vade"]),
        ("vade,gdpo", ["vade", "gdpo"]),
        ("vade gdpo", ["vade", "gdpo"]),
        ("[vade, gdpo]", ["vade", "gdpo"]),
        (["vade", "gdpo"], ["vade", "gdpo"]),
        (("vade , gdpo",), ["vade", "gdpo"]),
    ],
)
def test_forms_of_methods(written, names):
    assert registry.parse_methods(written) == names
    assert build_stack(written).names == names


@pytest.mark.parametrize("written", [3, {"vade": 1, 2: 3}, [["vade"]], [None]])
def test_what_is_no_list_of_names_is_refused(written):
    assert "it must be a list of method names" in refused(written)


def test_a_name_twice_is_refused():
    assert "names `vade` 2 times" in refused("vade, gdpo, vade")


@pytest.mark.parametrize(
    "written",
    [
        {"mc_grpo": {"mad_eps": 0.5}},
        {"mc_grpo": {"mad_eps": "5e-1"}},
        '{"mc_grpo": {"mad_eps": 0.5}}',
        "{mc_grpo: {mad_eps: 5e-1}}",
        "mc_grpo:\n  mad_eps: 0.5\n",
    ],
)
def test_forms_of_parameters(written):
    assert build_stack("mc_grpo", written).methods[0].params.mad_eps == 0.5


@pytest.mark.parametrize("number", [1e-07, 1e-3, 2.5e22, 3])
def test_json_text_gives_the_numbers_that_were_written(number):
    values = {"mc_grpo": {"mad_eps": number, "nested": {"list": [number, "1e-07", True, None]}}}
    assert registry.parse_method_params(json.dumps(values)) == values
    assert registry.parse_method_params(json.dumps(values, indent=2)) == values


@pytest.mark.parametrize("number", ["1e-07", "1e-3", "0.001", "1.0e-7"])
@pytest.mark.parametrize(
    "written", ['{"mc_grpo": {"mad_eps": %s}}', "{mc_grpo: {mad_eps: %s}}", "mc_grpo:\n  mad_eps: %s"]
)
def test_exponents_are_numbers_in_json_and_yaml(number, written):
    assert build_stack("mc_grpo", written % number).methods[0].params.mad_eps == float(number)


def test_a_quoted_text_that_looks_like_a_number_stays_text_in_json_and_yaml():
    for written in ('{"m": {"a": "1e-07", "b": "3"}}', "m: {a: '1e-07', b: '3'}"):
        assert registry.parse_method_params(written) == {"m": {"a": "1e-07", "b": "3"}}


@pytest.mark.parametrize("written", [None, "", {}, {"mc_grpo": None}, {"mc_grpo": {}}])
def test_no_parameters_are_the_defaults(written):
    assert build_stack("mc_grpo", written).methods[0].params == McGrpo.Params()


@pytest.mark.parametrize("written", [[1], "mc_grpo", {"mc_grpo": 3}, "{mc_grpo: [1"])
def test_unreadable_parameters_are_refused(written):
    assert "`method_params` is" in refused("mc_grpo", written)


def test_an_unknown_name_shows_the_nearest_ones():
    message = refused("mcgrpo")
    assert "Did you mean `mc_grpo`" in message and "rl-plugins list" in message
    assert "Did you mean `mc_grpo`" in refused("MC-GRPO")


def test_the_baseline_is_no_method():
    assert "leave `methods` empty" in refused("grpo")


def test_an_unknown_parameter_shows_the_nearest_ones():
    message = refused("mc_grpo", {"mc_grpo": {"mad_epps": 1}})
    assert "`mc_grpo` has no parameter `mad_epps`. Did you mean `mad_eps`?" in message
    assert "rl-plugins info mc_grpo" in message


def test_a_parameter_out_of_range_names_method_value_and_range():
    message = refused("mc_grpo", {"mc_grpo": {"mad_eps": 0}})
    assert "Method `mc_grpo`: parameter `mad_eps` is 0.0; it must be > 0." in message


def test_parameters_for_a_method_that_is_not_enabled_are_refused():
    message = refused("vade", {"mc_grpo": {"mad_eps": 1}})
    assert "`mc_grpo`, which is not among the methods of this run (enabled: vade)" in message
    assert "no method is enabled" in refused([], {"mc_grpo": {"mad_eps": 1}})


def test_two_methods_for_one_exclusive_hook_are_refused_by_name():
    message = refused(["mc_grpo", "gdpo"])
    assert "`mc_grpo` and `gdpo` both decide `advantages`" in message


# ---- classes of others that would be taken without a word, or end in somebody else's error


class Undecorated(MethodParams):
    """Its field is none: `@dataclass(frozen=True)` was forgotten."""

    eps: float = param(1e-3, "never read")


@dataclass(frozen=True)
class Raising(MethodParams):
    eps: float = param(1e-3, "added")
    low: float | None = param(None, "makes `check` fail", ge=0)

    def check(self) -> None:
        if self.eps < 0.5:
            raise KeyError("eps")


@dataclass(frozen=True)
class Picky(MethodParams):
    judge: str | None = param(None, "must be given")
    factor: float = param(1.0, "1 / 0 for 0")

    def check(self) -> None:
        if self.judge is None:
            raise ConfigError("nobody judges.")
        1 / self.factor


def my_class(**changes):
    good = {"name": "mine", "fidelity": "paper", "observe": lambda self, r, t, s: None}
    attributes = {k: v for k, v in {**good, **changes}.items() if v is not Ellipsis}  # Ellipsis: left out
    return type("Mine", (Method,), attributes)


def broken_init(self, params=None):
    raise FileNotFoundError("no such model")


def set_in_init(**values):
    def __init__(self, params=None):
        Method.__init__(self, params)
        vars(self).update(values)

    return __init__


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"observe": ...},
            "`Mine` overrides no hook and sets no option of a host, so it changes nothing. The hooks are: s",
        ),
        ({"observe": 3}, "`Mine.observe` is 3; a hook must be a function."),
        ({"aggregation": "median"}, '`Mine.aggregation` is \'median\'; it must be "host", "sum" or "none".'),
        ({"advantages_per": "token"}, '`Mine.advantages_per` is \'token\'; it must be "row" or "turn".'),
        ({"old_policy": None}, '`Mine.old_policy` is None; it must be "host", "proximal" or "generating".'),
        ({"rounds": "yes"}, "`Mine.rounds` is 'yes'; it must be True or False."),
        (
            {"brings": {"forced"}},
            "`Mine.brings` is {'forced'}; it must be a set of: off_policy, forced_tokens, redundancy",
        ),
        ({"rows_per_rollout": 0}, "`Mine.rows_per_rollout` is 0; it must be a whole number of at least 1."),
        ({"rows_per_rollout": True}, "`Mine.rows_per_rollout` is True; it must be a whole number"),
        ({"rows_per_rollout": property(lambda self: 0)}, "`Mine.rows_per_rollout` is 0; it must be a whole number"),
        ({"state_version": "1"}, "`Mine.state_version` is '1'; it must be a whole number"),
        ({"needs": None}, '`Mine.needs` is None; it must be a set of signals, e.g. frozenset({"text"}).'),
        ({"needs": "text"}, "`Mine.needs` is 'text'; it must be a set of signals"),
        ({"needs": ("text",)}, "`Mine.needs` is ('text',); it must be a set of signals"),
        ({"__init__": set_in_init(needs=None)}, "`Mine.needs` is None; it must be a set of signals"),
        ({"in_eval": ("plans",)}, "`Mine.in_eval` is ('plans',); it must be names of hooks"),
        ({"host_options": {"trl": None}}, "`Mine.host_options` is {'trl': None}; it must be a mapping of mappings"),
        ({"Params": Undecorated}, "Undecorated'>; `Params` must be a frozen dataclass"),
        ({"Params": Raising}, "`Mine` cannot be built: KeyError: 'eps' (in `check`, line "),
        ({"Params": None}, "`Mine.Params` is None; `Params` must be a frozen dataclass"),
        (
            {"__init__": broken_init},
            "`Mine` cannot be built: FileNotFoundError: no such model (in `broken_init`, line ",
        ),
        ({"__init__": lambda self: None}, "`Mine` cannot be built: TypeError: "),
        ({"needs": {"x" * 10**6: 1}}, "xx [cut]; it must be a set of signals"),
    ],
)
def test_what_would_be_taken_without_a_word_is_refused(changes, reason):
    registry.check_class(my_class(), "mine", "here")
    with pytest.raises(ConfigError, match=re.escape(reason)) as e:
        registry.check_class(my_class(**changes), "mine", "here")
    assert (
        str(e.value).startswith("The method `mine` from here does not fit the contract: ") and len(str(e.value)) < 700
    )


def test_options_of_a_host_alone_are_a_method():
    registry.check_class(my_class(observe=..., host_options={"trl": {"beta": 0.1}}), "mine", "here")


def test_code_of_a_class_that_fails_on_the_parameters_of_a_run_names_it(plugins, monkeypatch):
    cls = my_class(Params=Picky)
    registry.check_class(cls, "mine", "here")  # a parameter must be given, so nothing is built
    monkeypatch.setattr(registry, "load", lambda name, vetoed=(): cls)
    assert build_stack("mine", {"mine": {"judge": "x"}}).methods[0].params.judge == "x"
    assert "Method `mine`: nobody judges." in refused("mine")
    assert "`Mine` cannot be built: ZeroDivisionError: float division by zero (in `check`, line" in refused(
        "mine", {"mine": {"judge": "x", "factor": 0}}
    )


@pytest.mark.parametrize("error", ["SystemExit(0)", "GeneratorExit", "BaseException('odd')"])
def test_a_module_that_ends_the_process_when_it_is_imported_is_broken_like_others(plugins, monkeypatch, error):
    def load():
        raise eval(error)

    origin = registry.Origin("mine", "some-package", "some.module:Mine", load)
    origins = registry._origins
    monkeypatch.setattr(registry, "_origins", lambda name: [origin] if name == "mine" else origins(name))
    assert "`mine` from `some.module:Mine` of the package some-package cannot be loaded: " in refused("mine")
    monkeypatch.setattr(registry, "_member", lambda name: load() if name == "vade" else {})
    assert "vade" in registry.all_names() and "`vade` from " in refused("vade")


@pytest.mark.parametrize(
    ("bundle", "reason"),
    [
        (Bundle("mine", {"vade": None}), "has the parts {'vade': None}; it must map methods to"),
        (Bundle("mine", ["vade"]), "has the parts ['vade']; it must map methods to"),
        (Bundle("mine", {}), "has the parts {}; it must map methods to"),
        (Bundle("other", {"vade": {}}), "is called `'other'` but registered as `mine`"),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused(monkeypatch, bundle, reason):
    monkeypatch.setattr(registry, "_origins", lambda name: [registry.Origin(name, "p", "m:b", lambda: bundle)])
    assert reason in refused("mine")


# ---- habits from YAML, and values that are no config


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (
            {"vade": {"selected_decay": 0.7}},
            'methods: ["vade"]\nmethod_params: {"vade": {"selected_decay": 0.7}}',
        ),
        (
            [{"vade": {"selected_decay": 0.7}}, "mc_grpo"],
            'methods: ["vade", "mc_grpo"]\nmethod_params: {"vade": {"selected_decay": 0.7}}',
        ),
        (
            {"vade": {"selected_decay": 0.7}, "mc_grpo": None},
            'methods: ["vade", "mc_grpo"]\nmethod_params: {"vade": {"selected_decay": 0.7}}',
        ),
        ({"vade": None}, 'methods: ["vade"]'),
    ],
)
def test_parameters_beside_names_are_refused_with_the_lines_to_write(written, lines):
    message = refused(written)
    assert message.startswith("`methods` is ") and message.endswith(f"Parameters stand apart. Write:\n{lines}")
    config = yaml.safe_load(lines)
    stack = build_stack(config["methods"], config.get("method_params"))
    assert stack.names == config["methods"]
    assert stack.methods[0].params.selected_decay == (
        0.7 if "method_params" in config else Vade.Params().selected_decay
    )


@pytest.mark.parametrize(
    "written", [{"vade": 1}, {3: {}}, [["vade"]], {"vade": {"x": object()}}, {"vade": {"x": {1, 2}}}]
)
def test_what_cannot_be_written_apart_is_refused_all_the_same(written):
    message = refused(written)
    assert "it must be a list of method names" in message and "Write:" not in message


@pytest.mark.parametrize("written", [{"vade", "mc_grpo"}, frozenset({"vade"}), set()])
def test_a_set_of_methods_has_no_order_and_is_refused(written):
    assert "which has no order, and the order of methods counts. Write a list" in refused(written)


@pytest.mark.parametrize(
    "written",
    [
        {1: {"mad_eps": 1}},
        {10**6000: {}},
        "1: {mad_eps: 1}",
        "{mc_grpo: {mad_eps: 1, mad_eps: 2}}",
        '{"mc_grpo": {"mad_eps": 1, "mad_eps": 2}}',
        '{"mc_grpo": {}, "mc_grpo": {}}',
        "\x00\x01",
    ],
)
def test_parameters_that_are_no_config_are_refused(written):
    message = refused("mc_grpo", written)
    assert message.startswith("`method_params` is ") and len(message) < 500


LONG = "long" * 10**5


@pytest.mark.parametrize(
    ("methods", "params"),
    [
        (LONG, None),
        ([LONG, LONG], None),
        (["vade", f"-{LONG}"], None),
        ([3, LONG], None),
        ({"vade": {"selected_decay": LONG}}, None),
        ("vade", {LONG: {}}),
        ("vade", LONG),
        ("vade", {"vade": {LONG: 1}}),
        ("vade", {"vade": {"selected_decay": LONG}}),
        ("vade", {"vade": LONG}),
        ("brpo", {"brpo": {"judge": LONG}}),
        ("brpo", {"brpo": {"judge": f"{LONG}:x"}}),
        ("brpo", {"brpo": {"judge": "math:sqrt", "tie_value": LONG}}),
        ("brpo", {"brpo": {"judge": "math:sqrt", "tie_value": 10**6000}}),
    ],
)
def test_no_message_repeats_a_long_value(methods, params):
    assert len(refused(methods, params)) < 1500


def test_a_class_in_methods_is_told_the_way_to_a_name() -> None:
    with pytest.raises(ConfigError, match=r"`my_module:Mine` names a class.*`rl-plugins new NAME`"):
        registry.select(["my_module:Mine"])
