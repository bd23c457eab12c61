"""What `defs.yaml` beside this file uses in its templates."""

import dagster as dg


@dg.template_var
def new_data() -> dg.AutomationCondition:
    """Return a condition that fires for every update of a source.

    Also for one that comes during a run or right after a request, which `eager()` may miss.
    """
    return dg.AutomationCondition.any_deps_updated() & ~dg.AutomationCondition.any_deps_missing()
