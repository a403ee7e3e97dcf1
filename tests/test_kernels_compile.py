"""Every kernel source compiles with NVRTC for every compute capability that we name, without a GPU."""

import re

import pytest
from kernel_shim import KERNELS, PRELUDE, kernel_names, kernel_sources, takes_unit

CAPABILITIES = ["75", "80", "90", "100", "120"]
SOURCES = {path.name: path.read_text() for path in kernel_sources()}
VARIANTS = [(name, unit) for name, text in SOURCES.items() for unit in ((1, 2, 4, 8) if takes_unit(text) else (None,))]


@pytest.fixture(scope="module")
def nvrtc():
    """CuPy's NVRTC bindings, loaded."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ModuleNotFoundError)
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    return cupy.cuda.nvrtc


def compile_source(nvrtc, name: str, unit: int | None, capability: str) -> bytes:
    source = (KERNELS / PRELUDE).read_text() + "\n" + SOURCES[name]
    options = [f"-arch=sm_{capability}", "-std=c++17"]
    if unit is not None:
        options.append(f"-DUNIT_BYTES={unit}")
    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        assert "warning" not in nvrtc.getProgramLog(program)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_there_are_sources() -> None:
    assert "apply_write.cu" in SOURCES


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "unit"), VARIANTS)
def test_compiles(nvrtc, name: str, unit: int | None, capability: str) -> None:
    if int(capability) > 90 and nvrtc.getVersion() < (12, 8):
        pytest.skip(f"NVRTC {nvrtc.getVersion()} is older than compute capability {capability}")
    cubin = compile_source(nvrtc, name, unit, capability)
    assert cubin[:4] == b"\x7fELF"
    for kernel in kernel_names(SOURCES[name]):
        assert b"\0" + kernel.encode() + b"\0" in cubin  # the plain name, by which the loader looks it up


@pytest.mark.parametrize("name", [PRELUDE, *SOURCES])
def test_includes_nothing(name: str) -> None:
    assert not re.search(r"^\s*#\s*include", (KERNELS / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_is_extern_c(name: str) -> None:
    code = re.sub(r"//.*", "", SOURCES[name])
    assert kernel_names(code)
    assert len(kernel_names(code)) == code.count("__global__")


@pytest.mark.parametrize("name", [PRELUDE, *SOURCES])
def test_ends_with_a_newline(name: str) -> None:
    assert (KERNELS / name).read_text().endswith("\n")  # the loader joins files
