"""The checkout of Megatron-LM that a script belongs to: where it is, and of which release."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from liver_hpc.errors import ConfigError
from liver_hpc.recipes.megatron_lm.options import ScriptOptions

_PACKAGE_INFO = Path("megatron/core/package_info.py")
_TRAINING = Path("megatron/training/__init__.py")
_NOT_GIVEN = "; without this key it is the script's own directory: name the checkout here"
_PARTS = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?([0-9a-z]*)", re.MULTILINE)


def check(options: ScriptOptions) -> None:
    """Raises ConfigError where there is no such script or checkout, or where megatron-core is
    installed in another release than the checkout's: some of both would be used."""
    if not options.script.is_file():
        raise ConfigError(f"model.script: there is no file {options.script}")
    checkout = options.checkout
    if not (checkout / _TRAINING).is_file():
        raise ConfigError(
            f"model.megatron_lm: {checkout} is no checkout of Megatron-LM: it lacks {_TRAINING}"
            f"{_NOT_GIVEN if options.megatron_lm is None else ''}"
        )
    mine = core_release(checkout)
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return
    if mine is not None and _public(installed) != mine:
        raise ConfigError(
            f"model.megatron_lm: {checkout} has megatron-core {mine}, {installed} is installed: "
            f"install megatron-core=={mine}, or check out a tag that has {_public(installed)}"
        )


def check_imported(options: ScriptOptions) -> None:
    """Raises ConfigError where this process has imported megatron.core from elsewhere, or from the
    checkout as it was before another release was checked out there."""
    mine = core_release(options.checkout)
    if mine is None:
        return  # of which only megatron.training is wanted
    core = sys.modules.get("megatron.core")
    found = Path(str(getattr(core, "__file__", None))).resolve()
    if core is not None and options.checkout.resolve() not in found.parents:
        raise ConfigError(
            f"megatron.core was imported from {found.parent}, not from the checkout "
            f"{options.checkout}: it is to be first on Python's path"
        )
    if core is not None and _public(core.__version__) != mine:
        raise ConfigError(
            f"model.megatron_lm: {options.checkout} had megatron-core {core.__version__} when "
            f"this process imported it, and has {mine} by now: check out what the run began with"
        )


def core_release(checkout: Path) -> str | None:
    """The release of a checkout's megatron-core, as 0.16.1; None where it has none."""
    try:
        text = (checkout / _PACKAGE_INFO).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    parts: dict[str, str] = dict(_PARTS.findall(text))
    numbers = ".".join(parts.get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))
    return numbers + parts.get("PRE_RELEASE", "")


def _public(release: str) -> str:
    """A release without what a build has added to its number."""
    return release.partition("+")[0]
