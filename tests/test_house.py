"""Rules of the house, checked over every file: who imports whom, what is read, what is pinned."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "qwen35_jax", "serve")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What a package may import of the others. The command line may also start servers and benchmarks,
# from inside the function of that command.
MAY_IMPORT = {
    "pallas_kernels": set[str](),
    "qwen35_jax": {"pallas_kernels"},
    "serve": {"qwen35_jax", "pallas_kernels"},
}
COMMAND_LINE = "qwen35_jax/cli.py"

WITHOUT_JAX = (
    "qwen35_jax",
    "qwen35_jax.chat_template",
    "qwen35_jax.cli",
    "qwen35_jax.config",
    "qwen35_jax.default_model",
    "qwen35_jax.engine_arguments",
    "qwen35_jax.errors",
    "qwen35_jax.hub",
    "qwen35_jax.model_files",
    "qwen35_jax.outputs",
    "qwen35_jax.sampling_params",
    "qwen35_jax.tokenizer",
    "qwen35_jax.engine.fake",
    "qwen35_jax.engine.id_pool",
    "qwen35_jax.engine.messages",
    "qwen35_jax.engine.plan",
    "qwen35_jax.engine.process",
    "qwen35_jax.engine.request",
    "qwen35_jax.engine.scheduler",
    "qwen35_jax.engine.stopping",
    "qwen35_jax.engine.text_stream",
    "qwen35_jax.engine.thread",
)
MAY_READ_THE_ENVIRONMENT = ("qwen35_jax/config.py", "serve/config.py")
TEXT_SUFFIXES = (
    *(".py", ".md", ".toml", ".txt", ".cfg", ".ini", ".yaml", ".yml"),
    *(".json", ".jsonl", ".ipynb", ".jinja", ".sh", ".service"),
)
TEXT_NAMES = ("Makefile", "LICENSE", "Dockerfile", "run", ".python-version", ".gitignore")
FOLDERS = (*PACKAGES, "bench", "tests", "notebooks", ".ci")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(full name, whether the import is inside a function) of everything a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside_functions = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        local = id(node) in inside_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, local
        elif isinstance(node, ast.ImportFrom):
            # A relative import that climbs out of its package shows up by its full name.
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module]))), local


def _text_files() -> list[Path]:
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(path for path in files if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES)


def _pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pinned}


def _requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    return [Requirement(line) for line in lines]


def test_the_sources_are_found() -> None:
    assert "qwen35_jax/errors.py" in map(_name, SOURCES)
    assert {"pyproject.toml", ".ci/run", "tests/test_house.py"} <= set(map(_name, _text_files()))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_imports_flow_from_serve_to_qwen35_jax_to_pallas_kernels(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    refused = ({*PACKAGES, "bench", "tests"} - {package}) - MAY_IMPORT[package]
    wrong = [
        name
        for name, local in _imports(path)
        if name.split(".")[0] in refused
        and not (_name(path) == COMMAND_LINE and local and not name.startswith("tests"))
    ]
    assert wrong == []


def test_doors_and_host_bookkeeping_load_no_jax() -> None:
    serve = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if _name(path).startswith("serve/") and path.name != "__main__.py"
    ]
    assert serve, "serve has no modules"
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    loaded = {'jax', 'jaxlib', 'flax', 'torch', 'triton'} & sys.modules.keys()\n"
        "    if loaded: sys.exit(f'{name} loads {sorted(loaded)}')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *WITHOUT_JAX, *serve],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_jax_triton_has_one_importer() -> None:
    importers = {
        _name(path)
        for path in SOURCES
        if any(name.split(".")[0] == "jax_triton" for name, _ in _imports(path))
    }
    assert importers <= {"pallas_kernels/triton_call.py"}


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_the_environment_is_read_only_by_config(path: Path) -> None:
    if _name(path) in MAY_READ_THE_ENVIRONMENT:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {"environ", "environb", "getenv"}
    read = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]
    assert read == []


def test_no_file_holds_a_path_of_one_machine_or_an_address_of_a_registry() -> None:
    # Spelled in parts, so that this file passes its own test.
    machine_path = "(?<![A-Za-z0-9_.])/(?:" + "work|root" + ")/"
    registry = "py" + r"pi\.org|python" + r"hosted\.org|" + "index" + r"-url|https?://\S+\.whl"
    refused = re.compile(f"{machine_path}|{registry}")
    found = [
        f"{_name(path)}:{number}: {line.strip()[:100]}"
        for path in _text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if refused.search(line)
    ]
    assert found == []


def test_constraints_are_names_and_exact_versions_in_order() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pins = _pins()
    unfit = [
        str(requirement)
        for requirement in _requirements()
        if (version := pins.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(version)
    ]
    assert unfit == []


def test_what_the_requirements_require_is_pinned_too() -> None:
    pins = _pins()
    missing: set[str] = set()
    waiting = [(requirement, "") for requirement in _requirements()]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, wanted_by_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": wanted_by_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in pins:
            missing.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # Of an extra that isn't installed here.
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(line), extra) for line in distribution.requires or ()]
    assert missing == set()


def test_the_python_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    minimum = (ROOT / ".python-version").read_text(encoding="utf-8").strip()
    assert project["project"]["requires-python"] == f">={minimum}"
    assert project["tool"]["ruff"]["target-version"] == f"py{minimum.replace('.', '')}"
    assert project["tool"]["basedpyright"]["pythonVersion"] == minimum
