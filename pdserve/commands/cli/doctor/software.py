"""The native extension, Python, and the packages that pdserve needs."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import pdserve
from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.engine.plan.forms import FLOAT32, FORMS, ActivationDtype
from pdserve.engine.plan.matrix import Matrix, Part

_WIDTH = 2048  # number of inputs of the matrices that kernels are tried on
_REMEDY = "run `make env` in the source tree, or `pip install` the wheel"


def builds_component() -> Component:
    """The builds of the kernels that this CPU runs; nothing is measured."""
    try:
        variants: list[str] = importlib.import_module("pdserve._native").kernel_variants()
    except ImportError as error:
        return Component(
            topic="native kernels",
            name="pdserve._native",
            verdict=Availability.BROKEN,
            detail=f"not built ({error}): {_REMEDY}",
            needed_for="attention, sampling and KV transfer: every node",
        )
    return Component(
        topic="native kernels",
        name="builds for this CPU",
        verdict=Availability.OK,
        detail=", ".join(variants),
    )


def native_components() -> list[Component]:
    """Whether the native extension is built, and which of its kernels this CPU runs."""
    builds = builds_component()
    if builds.verdict is Availability.BROKEN:
        return [builds]
    found = [builds, _fastest_kernels()]
    features: dict[str, bool] = importlib.import_module("pdserve._native").cpu_features()
    for name, is_there in features.items():
        found.append(
            Component(
                topic="native kernels",
                name=name,
                verdict=Availability.OK if is_there else Availability.ABSENT,
                detail="this CPU has it" if is_there else "this CPU does not have it",
                needed_for="faster kernels on CPUs that have it",
            )
        )
    return found


def _fastest_kernels() -> Component:
    """The build that a node would choose for each kind of weights, as measured now."""
    name, need = "fastest builds", "every node"
    try:
        from pdserve.engine.native.choice import choose_kernels
    except ImportError as error:
        detail = f"cannot be measured without torch: {error}"
        return Component(
            topic="native kernels",
            name=name,
            verdict=Availability.BROKEN,
            detail=detail,
            needed_for=need,
        )
    chosen = []
    for form in FORMS.values():
        if "cpu" in form.devices:
            dtype = ActivationDtype.FLOAT32 if form is FLOAT32 else ActivationDtype.BFLOAT16
            matrix = Matrix("", (Part("", range(1)),), range(_WIDTH), form)
            chosen.append(f"{form.name}: {choose_kernels([matrix], dtype, form, None)}")
    return Component(
        topic="native kernels", name=name, verdict=Availability.OK, detail=", ".join(chosen)
    )


def software_components() -> list[Component]:
    """pdserve, Python, and every package that the distribution requires."""
    own = Component(
        topic="software",
        name="pdserve",
        verdict=Availability.OK,
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


def _package(name: str) -> Component:
    try:
        verdict, detail = Availability.OK, version(name)
    except PackageNotFoundError:
        verdict, detail = Availability.BROKEN, f"not installed: {_REMEDY}"
    return Component(
        topic="software", name=name, verdict=verdict, detail=detail, needed_for="pdserve itself"
    )
