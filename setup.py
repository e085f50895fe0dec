"""Build of the native core. Metadata lives in pyproject.toml.

The environment variable FASTCAP_BUILD chooses the mode:

``release`` (default)   optimised, no checks
``debug``               -O0 -g, assertions, Cython's bounds and None checks, reference nanny
``sanitize``            AddressSanitizer and UBSan on top of ``debug`` flags (see ``make sanitize``)

Each mode has its own build folder. After a change of mode, ``build_ext --inplace`` needs ``--force``: it compares
time stamps, not flags.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

MODES = {
    "release": {"compile": ["-O3", "-fno-strict-aliasing", "-fvisibility=hidden", "-DNDEBUG"], "link": []},
    "debug": {"compile": ["-O0", "-g3", "-UNDEBUG", "-DCYTHON_REFNANNY=1"], "link": []},
    "sanitize": {
        "compile": ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
                    "-fno-sanitize-recover=undefined"],
        "link": ["-fsanitize=address,undefined"],
    },
}

mode = os.environ.get("FASTCAP_BUILD", "release")
if mode not in MODES:
    raise SystemExit(f"FASTCAP_BUILD={mode!r}: expected one of {', '.join(MODES)}")
checked = mode != "release"

DIRECTIVES = {
    "language_level": 3,
    "auto_pickle": False,
    "autotestdict": False,
    "embedsignature": True,
    "boundscheck": checked,
    "wraparound": False,
    "nonecheck": checked,
    "initializedcheck": checked,
    "cdivision": True,
    "overflowcheck": False,
}

# MSVC has other spellings for everything above; there the compiler's own defaults are used.
flags = MODES[mode] if os.name != "nt" else {"compile": [], "link": []}
headers = glob("src_cython/*.pxd")

extensions = [
    Extension(
        f"fastcap._native.{os.path.basename(source)[:-4]}",
        [source],
        depends=[*headers, *glob("src_cython/*.pyx")],  # setuptools puts these into the sdist
        extra_compile_args=flags["compile"],
        extra_link_args=flags["link"],
    )
    for source in sorted(glob("src_cython/*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        compiler_directives=DIRECTIVES,
        include_path=["src_cython"],
        build_dir=f"build/cython-{mode}",
    ),
    options={"build": {"build_base": f"build/{mode}"}},
)
