"""Which files decide whether machine code in the cache is still right."""

from __future__ import annotations

import ast
from pathlib import Path

import deltaforge_dagster
from deltaforge_dagster.kernels.compiler import compiled_from

PACKAGE = Path(deltaforge_dagster.__file__).parent


def test_what_a_kernel_depends_on_decides(tmp_path: Path) -> None:
    """Its module, what that imports in any form, and what these import; nothing else."""
    texts = {
        "__init__": "",
        "rows": "from some.marks import (\n    COMMA,\n    DOT,\n)\nfrom some import text\n@kernel\ndef f(): ...",
        "marks": "import some.codes\nCOMMA = some.codes.COMMA",
        "codes": "COMMA = 44",
        "text/__init__": "def g():\n    from some.text import late",
        "text/late": "",
        "decoder": "from some.rows import f",
    }
    for name, text in texts.items():
        path = tmp_path / "some" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    found = compiled_from(tmp_path / "some")

    assert sorted(found) == [
        "some",
        "some.codes",
        "some.marks",
        "some.rows",
        "some.text",
        "some.text.late",
    ]


def test_no_import_is_missed() -> None:
    """Every module of ours that Python's parser sees imported where kernels are counts, too."""
    found = compiled_from(PACKAGE)
    missed = set()
    for name, text in found.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                imported = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                imported = [one.name for one in node.names]
            else:
                continue
            missed |= {one for one in imported if _is_ours(one) and one not in found}

    assert missed == set()
    assert "deltaforge_dagster.sources.postgres.decode.layout" in found
    assert "deltaforge_dagster.sources.postgres.source" not in found


def _is_ours(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return module.startswith("deltaforge_dagster.") and (
        path.is_dir() or path.with_suffix(".py").exists()
    )
