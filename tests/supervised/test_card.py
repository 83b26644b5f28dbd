"""The card of OTR, and what its name in `methods` leads to."""

from __future__ import annotations

import pytest

from rl_plugins.cards import info
from rl_plugins.cards.listing import print_list
from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import build_stack
from rl_plugins.tools import supervised

POINTER = (
    r"`otr` is a loss for supervised trainers, not a method: .*TRL: `rl-plugins trl sft --loss_type otr`; "
    r"verl: `torchrun --nproc_per_node=N -m rl_plugins\.verl\.otr`.*`rl-plugins info otr`"
)


@pytest.mark.parametrize("methods", ["otr", ["vade", "otr"]])
def test_in_methods_it_is_an_error_with_a_pointer(methods):
    with pytest.raises(ConfigError, match=POINTER):
        build_stack(methods)
    with pytest.raises(ConfigError, match=POINTER):
        build_stack(["vade", "otr"], {"otr": {"beta": 0.1}})


def test_info_says_what_it_is_and_how_to_start_it(capsys):
    info.print_info("otr")
    text = capsys.readouterr().out
    for said in (
        "beta = -0.1   (float, >= -1, < 1)",
        "kappa = 1.3",
        "noisy DFT",
        "-0.1 is an assumption",
        "TRL: rl-plugins trl sft --loss_type otr",
        "verl: torchrun --nproc_per_node=N -m rl_plugins.verl.otr",
        "`methods` does not take it",
        "eprint = {2509.26313}",
        "reconstruction: ",
    ):
        assert said in text, said


def test_the_list_names_it(capsys):
    print_list()
    assert "For supervised trainers, outside of `methods`: otr." in capsys.readouterr().out


def test_every_loss_has_a_card_and_a_way_to_start():
    for name in supervised.LOSSES:
        card = supervised.card_of(name)
        assert card.name == name and set(card.start) == {"TRL", "verl"}
        file = card_file(name)
        assert all((card.does, card.about, file.use_when, file.avoid_when, file.cost, file.disagreements, file.paper))
    assert supervised.not_a_method("vade") == ""
