"""What a program needs, found in the environment that runs these tests."""

import pytest

from images.python import SITE, ImageError, distributions, installed, interpreter, linked


def test_needs_are_followed_with_their_extras_and_markers() -> None:
    requires = ["click>=8", 'kopf; extra == "operator"', 'nowhere; python_version < "3"', 'nowhere; extra == "other"']
    plain = {each.name for each in distributions(requires, (), without=())}
    whole = {each.name for each in distributions(requires, ("operator",), without=())}
    assert plain == {"click"}
    assert {"click", "kopf", "aiohttp", "yarl"} <= whole
    assert "aiohttp" not in {each.name for each in distributions(requires, ("operator",), without=("aio",))}


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(ImageError, match="no-such-thing"):
        distributions(["no-such-thing>=1"], (), without=())


def test_files_move_to_the_environment_of_the_image() -> None:
    paths = {entry.path for entry in installed(distributions(["click"], (), without=()))}
    assert f"{SITE}/click/__init__.py" in paths
    assert all(path.startswith(SITE) for path in paths)


def test_libraries_of_the_interpreter_are_found() -> None:
    names = {entry.path.rpartition("/")[2] for entry in linked(interpreter())}
    assert {"libc.so.6", "libgcc_s.so.1"} <= names
