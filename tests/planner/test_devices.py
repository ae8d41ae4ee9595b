"""Facts about devices: each says where it comes from, and a user's file replaces any of them."""

import pytest

from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.planner.devices import ASSUMED, DATA_SHEET, DEVICES, FIGURES, PUBLISHED, read_device, usual_device


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    device = DEVICES[name]
    assert device.profile in PROFILES
    for figure in FIGURES:
        assert device.source(figure).split(":")[0] in {DATA_SHEET, PUBLISHED, ASSUMED, "measured"}
    assert set(device.sources) <= set(FIGURES)


def test_a_file_replaces_figures_of_a_row() -> None:
    device = read_device({"name": "h20-141", "like": "h20", "memory": 141e9, "train": 0.6}, where="mine.yaml")
    assert (device.memory, device.train, device.bf16) == (141e9, 0.6, DEVICES["h20"].bf16)
    assert device.source("train") == "mine.yaml"
    assert device.source("bf16") == DATA_SHEET


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"like": "h300"}, "like: 'h300' is not a known device"),
        ({"like": "h100", "name": "mine", "memry": 1.0}, "unknown field `memry`"),
        ({"like": "h100", "name": "mine", "usable": 1.5}, r"<= 1.0 - at `\$.usable`"),
        ({"name": "mine", "profile": "nvidia"}, "missing required field `memory`"),
    ],
)
def test_a_wrong_file_is_refused(figures: dict, why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        read_device(figures, where="mine.yaml")


def test_a_profile_without_a_usual_device_asks_for_one() -> None:
    assert usual_device("ascend-a2").name == "910b"
    with pytest.raises(ManifestError, match="knows no device of the profile 'ascend-a5'"):
        usual_device("ascend-a5")
