"""Tests of what a program needs, found in the environment that runs these tests."""

import pytest

from images.python import SITE, VENV, ImageError, distributions, installed, interpreter, linked, programs


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


def test_command_lines_run_the_python_of_the_image() -> None:
    made = {entry.path: entry.content for entry in installed(distributions(["kopf"], (), without=()))}
    program = (made[f"{VENV}/bin/kopf"] or b"").decode()
    assert program.startswith(f"#!{VENV}/bin/python\n")
    assert program.endswith("from kopf.cli import main\nsys.exit(main())\n")


def test_programs_of_packages_lie_where_those_would_put_them_with_their_libraries() -> None:
    found = programs(["redis-server", "libnuma1"])
    assert [entry.path for entry in found] == ["/usr/bin/redis-server"]
    libraries = {entry.path for entry in linked(found)}
    assert any(path.startswith(("/lib/", "/usr/lib/")) and "/libc.so" in path for path in libraries)
    assert not any(".cache" in path for path in libraries)
    assert programs([]) == []


def test_a_package_that_is_not_known_is_named() -> None:
    with pytest.raises(ImageError, match="cowsay"):
        programs(["cowsay"])


def test_libraries_of_the_interpreter_are_found() -> None:
    names = {entry.path.rpartition("/")[2] for entry in linked(interpreter())}
    assert {"libc.so.6", "libgcc_s.so.1"} <= names
