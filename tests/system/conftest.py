"""After the fault tests: how long the jobs took to end."""

import statistics


def pytest_terminal_summary(terminalreporter):
    times = {}
    for report in terminalreporter.stats.get("passed", []):
        found = dict(report.user_properties)
        if "end_s" in found:
            times.setdefault(found["fault"], []).append(found["end_s"])
    if not times:
        return
    terminalreporter.write_sep("-", "seconds from a fault to the end of the last process")
    terminalreporter.write_line(f"{'fault':<32}{'cases':>6}{'median':>9}{'worst':>9}")
    for fault, seconds in sorted(times.items()):
        median = statistics.median(seconds)
        terminalreporter.write_line(f"{fault:<32}{len(seconds):>6}{median:>9.2f}{max(seconds):>9.2f}")
