"""What a wheel and an sdist hold, and where they work."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors import safe_open
from safetensors.torch import load_file, save

import pdkernels as pd
from pdkernels import _native
from pdkernels.models.checkpoints.zoo import _from_planes
from tests.support.forks import forked
from tests.test_packaging import AS_BUILT, ROOT, USE, elsewhere, load, new_environment, pip, python, run


def built(factory: pytest.TempPathFactory, name: str, source: Path) -> Path:
    """A wheel, built once in a test run: the first worker that needs it builds it, the others wait for that."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            building = factory.mktemp("building")
            options = ["--no-deps", "--no-build-isolation", "--wheel-dir", building]
            environment = AS_BUILT | elsewhere(building / "build")
            run(sys.executable, "-m", "pip", "wheel", *options, source, environment=environment)
            folder.mkdir()
            shutil.move(next(building.glob("*.whl")), folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "wheel", ROOT)


@pytest.fixture(scope="session")
def smollm2_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "wheel-smollm2", ROOT / "packages/smollm2")


def contents(wheel: Path) -> set[str]:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.endswith("LICENSE") for name in names)
    return {name for name in names if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = [*(ROOT / "pdkernels").rglob("*.py"), *(ROOT / "pdkernels").rglob("*.safetensors")]
    expected = {str(path.relative_to(ROOT)) for path in tracked}
    expected |= {
        f"pdkernels/reference/{path.relative_to(ROOT / 'reference')}" for path in (ROOT / "reference").rglob("*.py")
    }
    expected |= {
        "pdkernels/_ops.so",
        f"pdkernels/_host{sysconfig.get_config_var('EXT_SUFFIX')}",
        "pdkernels/generation/replay.html",
        "pdkernels/serve/page.html",
        "pdkernels/py.typed",
        "pdkernels/_host.pyi",
        "pdkernels/decoding/signatures.pyi",
    }
    assert contents(wheel) == expected
    assert any(name.endswith(".safetensors") for name in expected)
    if not _native.cuda_archs():
        entries = {Path(entry.filename).name.partition(".")[0]: entry for entry in zipfile.ZipFile(wheel).infolist()}
        assert wheel.stat().st_size + 4 * entries["_host"].compress_size < 23.5e6  # with `_host` for five Pythons


def test_weights_in_the_wheel_are_those_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In planes there, which compress better; as safetensors reads the checkout's files, bit for bit."""
    archive = zipfile.ZipFile(wheel)
    for name in pd.models.available():
        entry = archive.getinfo(f"pdkernels/models/weights/{name}.safetensors")
        assert entry.compress_size < 0.72 * entry.file_size
        found = pd.models.load(archive.extract(entry, tmp_path), dtype=torch.bfloat16)
        stored = load_file(ROOT / entry.filename)
        state = found.state_dict()
        assert state.keys() == stored.keys()
        assert all(torch.equal(state[key].view(torch.int16), stored[key].view(torch.int16)) for key in stored)
        for fact in ("config", "mask_token", "plan_tokens"):
            assert getattr(found, fact) == getattr(pd.models.load(name), fact)


def test_planes_of_every_number(tmp_path: Path) -> None:
    """All 65536 of bfloat16, NaNs too; a second time nothing changes, and a file of other numbers is left as it is."""
    in_planes = load("setup.py").in_planes
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    tensors = {"b": numbers[:7].clone(), "a": numbers[7:].clone().view(3, -1)}
    made = in_planes(save(tensors, metadata={"config": "{}"}))
    assert in_planes(made) == made
    (tmp_path / "made.safetensors").write_bytes(made)
    with safe_open(tmp_path / "made.safetensors", framework="pt") as file:
        shapes = json.loads(file.metadata()["shapes"])
        found = _from_planes({name: file.get_tensor(name) for name in file.keys()}, shapes, torch.bfloat16)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].view(torch.int16), tensors[name].view(torch.int16)) for name in tensors)
    other = save({"a": numbers.float()}, metadata={"config": "{}"})
    assert in_planes(other) == other


def test_the_wheel_of_drafters_for_smollm2(smollm2_wheel: Path, tmp_path: Path) -> None:
    """Its folders alone, which `load` finds by its entry point wherever it is installed."""
    folder = ROOT / "packages/smollm2"
    tracked = [path for kind in ("py", "json", "safetensors") for path in folder.glob(f"pdkernels_smollm2/**/*.{kind}")]
    assert contents(smollm2_wheel) == {str(path.relative_to(folder)) for path in tracked}
    assert "-py3-none-any" in smollm2_wheel.name and smollm2_wheel.stat().st_size < 25e6
    zipfile.ZipFile(smollm2_wheel).extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from pdkernels.models import available_drafters
from pdkernels.models.checkpoints.packaged import weight_folder
names = [*available_drafters(), "smollm2-drafter"]
print(*(weight_folder(name).relative_to({str(tmp_path)!r}) for name in names), "pdkernels_smollm2" in sys.modules)
"""
    answer = forked(code)
    assert answer.returncode == 0, answer.stderr
    found = [f"pdkernels_smollm2/smollm2-{name}" for name in ("dflash", "eagle", "drafter")]
    assert answer.stdout.split() == [*found, "False"]


@pytest.mark.slow
def test_wheel_works_in_another_environment(wheel: Path, tmp_path: Path) -> None:
    interpreter = new_environment(tmp_path / "venv")
    pip(interpreter, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    answer = python(USE, executable=interpreter, cwd=tmp_path)
    package, reference = answer.stdout.split()
    assert package.startswith(str(tmp_path)) and reference == f"{package}/reference"
    assert pd.__version__ in run(tmp_path / "venv/bin/pdkernels", "doctor", cwd=tmp_path).stdout


def closure(*names: str) -> list[metadata.Distribution]:
    """These distributions and all that they need, without extras."""
    found: dict[str, metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # one for another platform
        for line in found[name].requires or ():
            required = Requirement(line)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                todo.append(required.name)
    return list(found.values())


@pytest.mark.slow
def test_a_wheel_with_what_it_pulls_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment in which only the wheel and its requirements can be found."""
    interpreter = new_environment(tmp_path / "venv", packages=False)
    site = Path(python("import sysconfig; print(sysconfig.get_path('purelib'))", executable=interpreter).stdout.strip())
    pip(interpreter, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = [line for line in archive.read(name).decode().splitlines() if line.startswith("Requires-Dist: ")]
    needed = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines]
    pulled = closure(*(one.name for one in needed if one.marker is None))
    assert {"torch", "safetensors"} <= {one.name for one in pulled}
    for distribution in pulled:
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "bin", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    code = (
        "import pdkernels as pd, sys\n"
        "result = pd.decoding.generate(pd.models.load('tiny-code'), 'import os', 'jacobi', max_new_tokens=8)\n"
        "assert len(result.tokens) == 8 and pd.has_native(), result\n"
        "for name in ('numpy', 'rich', 'typer', 'fastapi', 'tokenizers', 'transformers', 'pytest'):\n"
        "    assert name not in sys.modules, name\n"
        "print(repr(result.text))"
    )
    expected = pd.decoding.generate(pd.models.load("tiny-code"), "import os", "jacobi", max_new_tokens=8).text
    assert python(code, executable=interpreter, cwd=tmp_path).stdout.strip() == repr(expected)
    answer = run(tmp_path / "venv/bin/pdkernels", "doctor", cwd=tmp_path, fails=True)
    said = " ".join(answer.stdout.split())
    assert "missing: fastapi, h11, starlette, uvicorn; pip install fastapi h11 starlette uvicorn" in said
    assert "missing: rich, typer; pip install rich typer" in said
    # Torch says first that there is no numpy.
    assert answer.stderr.splitlines()[-1] == "The pdkernels command line needs typer and rich: pip install typer rich"


@pytest.mark.slow
def test_sdist_holds_all_sources(tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=ROOT, environment=elsewhere(tmp_path / "build"))
    archive = next(tmp_path.glob("*.tar.gz"))
    names = {name.partition("/")[2] for name in run("tar", "-tzf", archive).stdout.split()}
    sources = [
        path
        for folder in ("csrc", "python_bindings", "pdkernels", "reference", "tests", "bench", "docs", "scripts")
        for path in (ROOT / folder).rglob("*")
    ]
    wanted = {".py", ".pyi", ".h", ".cpp", ".cu", ".safetensors", ".json", ".typed", ".html"}
    missing = {str(path.relative_to(ROOT)) for path in sources if path.suffix in wanted} - names
    assert not missing


def test_sentences_about_other_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_py = load("setup.py")
    own = sysconfig.get_config_var("EXT_SUFFIX")
    monkeypatch.delenv("PDKERNELS_HOST_PYTHONS", raising=False)
    assert list(setup_py.host_pythons()) == [own]
    monkeypatch.setenv("PDKERNELS_HOST_PYTHONS", f"{sys.executable}:{sys.executable}")
    assert list(setup_py.host_pythons()) == [own]
    for wrong in ("no-such-python", "/bin/true"):
        monkeypatch.setenv("PDKERNELS_HOST_PYTHONS", wrong)
        with pytest.raises(
            SystemExit, match=f"PDKERNELS_HOST_PYTHONS must name Pythons with their headers, got '{wrong}'"
        ):
            setup_py.host_pythons()


def test_a_python_that_the_wheel_is_not_for(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    own = tmp_path / f"pdkernels/_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    own.rename(own.with_name("_host.cpython-39-x86_64-linux-gnu.so"))
    interpreter = new_environment(tmp_path / "venv")
    output = python("import pdkernels", executable=interpreter, cwd=tmp_path, fails=True).stderr
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"_host was not built for Python {version}, only for cpython-39-x86_64-linux-gnu. Build it with" in output


@pytest.mark.slow
def test_one_wheel_for_all_pythons_of_the_machine(tmp_path: Path) -> None:
    code = "import sys, sysconfig, os; assert (3, 10) <= sys.version_info[:2] != tuple(map(int, sys.argv[1:])); print(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/3.*/bin"))]
    others = []
    for interpreter in {name for folder in folders for name in Path(folder).glob("python3.[0-9][0-9]")}:
        asked = subprocess.run(
            [interpreter, "-c", code, *map(str, sys.version_info[:2])], capture_output=True, text=True
        )
        if asked.returncode == 0 and Path(asked.stdout.strip()).is_file():
            others.append(interpreter)
    if not others:
        pytest.skip("no other Python with headers")
    environment = (
        AS_BUILT | elsewhere(tmp_path / "build") | {"PDKERNELS_HOST_PYTHONS": os.pathsep.join(map(str, others))}
    )
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, environment=environment)
    (built,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in built.name
    zipfile.ZipFile(built).extractall(tmp_path)
    # Without torch, the module by itself.
    alone = "import sys; sys.path.insert(0, 'pdkernels'); import _host; print(_host.PageAllocator(2).allocate(1), _host.cpu_isa())"
    output = {run(interpreter, "-c", alone, cwd=tmp_path).stdout for interpreter in [sys.executable, *others]}
    assert len(output) == 1 and output.pop().startswith("[0] ")


@pytest.mark.slow
def test_the_sdist_builds_and_its_tests_run(tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=ROOT, environment=elsewhere(tmp_path / "build"))
    run("tar", "-xzf", next(tmp_path.glob("*.tar.gz")), "-C", tmp_path)
    (folder,) = tmp_path.glob("pdkernels-*/")
    run(
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--inplace",
        cwd=folder,
        environment={"PDKERNELS_BUILD_CUDA": "0"},
    )
    here = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/masks/test_anchored.py",
        cwd=folder,
        environment=here,
    )
