"""The native extension, Python, and the packages that pdserve needs."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import pdserve
from pdserve.commands.cli.doctor.finding import Finding, Verdict
from pdserve.engine.plan.forms import FLOAT32, FORMS, ActivationDtype
from pdserve.engine.plan.matrix import Matrix, Part

_WIDTH = 2048  # number of inputs of the matrices that kernels are tried on
_REMEDY = "run `make env` in the source tree, or `pip install` the wheel"


def builds_finding() -> Finding:
    """The builds of the kernels that this CPU runs; nothing is measured."""
    try:
        variants: list[str] = importlib.import_module("pdserve._native").kernel_variants()
    except ImportError as error:
        return Finding(
            topic="native kernels",
            name="pdserve._native",
            verdict=Verdict.BROKEN,
            detail=f"not built ({error}): {_REMEDY}",
            needed_for="attention, sampling and KV transfer: every node",
        )
    return Finding(
        topic="native kernels",
        name="builds for this CPU",
        verdict=Verdict.OK,
        detail=", ".join(variants),
    )


def native_findings() -> list[Finding]:
    """Whether the native extension is built, and which of its kernels this CPU runs."""
    builds = builds_finding()
    if builds.verdict is Verdict.BROKEN:
        return [builds]
    found = [builds, _fastest_kernels()]
    features: dict[str, bool] = importlib.import_module("pdserve._native").cpu_features()
    for name, is_there in features.items():
        found.append(
            Finding(
                topic="native kernels",
                name=name,
                verdict=Verdict.OK if is_there else Verdict.ABSENT,
                detail="this CPU has it" if is_there else "this CPU does not have it",
                needed_for="faster kernels on CPUs that have it",
            )
        )
    return found


def _fastest_kernels() -> Finding:
    """The build that a node would choose for each kind of weights, as measured now."""
    name, need = "fastest builds", "every node"
    try:
        from pdserve.engine.native.choice import choose_kernels
    except ImportError as error:
        detail = f"cannot be measured without torch: {error}"
        return Finding(
            topic="native kernels",
            name=name,
            verdict=Verdict.BROKEN,
            detail=detail,
            needed_for=need,
        )
    chosen = []
    for form in FORMS.values():
        if "cpu" in form.devices:
            dtype = ActivationDtype.FLOAT32 if form is FLOAT32 else ActivationDtype.BFLOAT16
            matrix = Matrix("", (Part("", range(1)),), range(_WIDTH), form)
            chosen.append(f"{form.name}: {choose_kernels([matrix], dtype, form, None)}")
    return Finding(topic="native kernels", name=name, verdict=Verdict.OK, detail=", ".join(chosen))


def software_findings() -> list[Finding]:
    """pdserve, Python, and every package that the distribution requires."""
    own = Finding(
        topic="software",
        name="pdserve",
        verdict=Verdict.OK,
        detail=f"{pdserve.__version__} on Python {platform.python_version()} at {sys.prefix}",
    )
    return [own, *(_package(name) for name in required_packages())]


def required_packages() -> list[str]:
    """Names of the packages that pdserve's metadata requires at run time."""
    try:
        requirements = requires("pdserve") or []
    except PackageNotFoundError:
        return []
    names = []
    for requirement in requirements:
        match = re.match(r"[\w.-]+", requirement)
        if match and "extra ==" not in requirement:
            names.append(match[0])
    return names


def _package(name: str) -> Finding:
    try:
        verdict, detail = Verdict.OK, version(name)
    except PackageNotFoundError:
        verdict, detail = Verdict.BROKEN, f"not installed: {_REMEDY}"
    return Finding(
        topic="software", name=name, verdict=verdict, detail=detail, needed_for="pdserve itself"
    )
