"""Arrow and Spark do without pandas until somebody uses it. Each test needs a process that has imported nothing."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas
arrow_without_pandas()
import pyarrow as pa
from deltaforge_dagster.pipeline.spark_client import SparkSession, functions
pa.array([1.5, None])
assert "pandas" not in sys.modules
"""


def run(program: str) -> None:
    """Run a program in a process of its own."""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_pandas_is_not_imported() -> None:
    """Neither arrays of Python objects nor PySpark's Connect client import pandas."""
    run(WITHOUT)


def test_arrow_knows_pandas_once_it_is_imported() -> None:
    """An array of a pandas series is what it would be if pandas had been imported first: NaN is null."""
    run(
        WITHOUT + "import pandas as pd\n"
        "assert pa.array(pd.Series([1.5, float('nan')])).null_count == 1\n"
        "assert pa.table({'a': [1]}).to_pandas().equals(pd.DataFrame({'a': [1]}))\n"
    )


def test_arrow_knows_pandas_that_others_have_searched_for() -> None:
    """To ask whether pandas is installed does not import it, and later its loader is the usual one."""
    run(
        WITHOUT + "import importlib.util\n"
        "assert all(importlib.util.find_spec('pandas') for _ in range(2))\n"
        "assert 'pandas' not in sys.modules\n"
        "import pandas as pd\n"
        "assert pa.array(pd.Series([1.5, float('nan')])).null_count == 1\n"
        "import pkgutil\n"
        "assert pkgutil.get_data('pandas', '__init__.py')\n"
    )


def test_spark_finds_pandas_when_it_needs_it() -> None:
    """What PySpark's client has imported of pandas turns out to be pandas itself, without anybody importing it first."""
    run(
        WITHOUT + "from pyspark.sql.connect import session\n"
        "found = session.pd.DataFrame({'a': [1]})\n"
        "import pandas as pd\n"
        "assert isinstance(found, pd.DataFrame) and isinstance(found, session.pd.DataFrame)\n"
        "assert session.is_datetime64_dtype(pd.Series(dtype='datetime64[ns]'))\n"
        "assert not session.is_timedelta64_dtype(found['a'])\n"
    )


def test_pandas_that_is_there_stays() -> None:
    """In a process that has imported pandas already, nothing stands in for it."""
    run(
        "import pandas as pd\n"
        + WITHOUT.replace("not in sys.modules", "in sys.modules")
        + "from pyspark.sql.connect import session\n"
        "assert session.pd is pd\n"
        "assert pa.array(pd.Series([float('nan')])).null_count == 1\n"
    )
