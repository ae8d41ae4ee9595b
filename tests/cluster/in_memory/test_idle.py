"""Jobs of which nothing new is seen cost no write, however long."""

from lives import START, Cluster, cluster
from world import quickstart

JOBS = 10
HOUR = 3600.0


def begin_jobs(idle: Cluster) -> None:
    for number in range(JOBS):
        manifest = quickstart("team", f"job-{number}")
        manifest["spec"]["rollout"]["replicas"] = 1
        manifest["spec"]["transferQueue"]["storageUnits"] = 1
        manifest["spec"]["limits"] = {"stallSeconds": 3 * HOUR}
        idle.server.put("rljobs", manifest)


async def test_ten_jobs_that_do_not_change_cost_no_write_in_an_hour_nor_when_the_operator_starts_again() -> None:
    async with cluster(begin_jobs) as idle:
        jobs = idle.server.of("rljobs")
        await idle.until(
            lambda: all(job.get("status", {}).get("phase") == "Running" for job in idle.server.of("rljobs").values()),
            f"{len(jobs)} jobs to run",
        )
        assert await idle.rest(START + HOUR) == 0
        await idle.begin()
        assert await idle.rest(START + 2 * HOUR) == 0
