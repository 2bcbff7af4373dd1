"""Replacing the running container while callers are at it: not one call may fail."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Callable

from tests.deploy.engine.deployment import Callers, Deployment, Docker

Make = Callable[[str], Deployment]

# docker shall find the new container unhealthy, whatever it answers.
NEVER = ("--health-cmd=exit 1", "--health-retries=1", "--health-start-period=1ms")
UNHEALTHY = [word for option in NEVER for word in ("--docker-option", option)]


def test_callers_of_both_addresses_lose_no_call(docker: Docker, deploy: Make) -> None:
    cats = deploy("blue and green")
    cats.start("--shm-size", "256m", "--", "--log-level", "info")
    docker("tag", docker.image, "triton-vision-test/next:1")
    (blue,) = cats.containers()
    green = blue.replace("-blue", "-green")
    with Callers(cats.callers_addresses()) as callers:
        callers.wait_for(10)
        done = cats("replace", "--image", "triton-vision-test/next:1")
        assert done.code == 0, done.err
        callers.wait_for(10)
        assert cats.containers() == {green}
        found = docker.inspect(green)
        assert found["Config"]["Image"] == "triton-vision-test/next:1"
        assert found["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
        # What was not said is as it was.
        assert found["HostConfig"]["ShmSize"] == 256 << 20
        assert found["Config"]["Cmd"][-2:] == ["--log-level", "info"]
        published = found["HostConfig"]["PortBindings"]["8001/tcp"][0]["HostPort"]
        assert int(published) == int(cats.ports["--grpc-port"]) + 10
        # And back again.
        done = cats("replace", "--image", docker.image)
        assert done.code == 0, done.err
        callers.wait_for(10)
        assert cats.containers() == {blue}
    assert callers.failed == []
    assert callers.answered > 30
    assert docker.inspect(blue)["Config"]["Image"] == docker.image


def test_a_new_container_that_does_not_become_healthy_changes_nothing(docker: Docker, deploy: Make) -> None:
    cats = deploy("careful")
    cats.start()
    (blue,) = cats.containers()
    before = docker.inspect(blue)["Id"]
    with Callers(cats.callers_addresses()) as callers:
        callers.wait_for(10)
        ill = cats("replace", *UNHEALTHY)
        assert (ill.code, ill.out) == (1, "")
        assert "docker's health check says unhealthy" in ill.err
        assert "the old container goes on serving at 127.0.0.1:" in ill.err
        wrong = cats("replace", "--ensemble", "ensemble_of_mine")
        assert (wrong.code, wrong.out) == (1, "")
        # Of what it needs, nothing may be taken; the ports of the second container are known.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", int(cats.ports["--http-port"]) + 10))
            listener.listen()
            taken = cats("replace")
        assert (taken.code, taken.out) == (2, "")
        assert f"port {int(cats.ports['--http-port']) + 10} of 127.0.0.1 is taken by" in taken.err
        shown = cats("replace", "--dry-run", "--shm-size", "2g")
        assert shown.code == 0, shown.err
        assert [command[:2] for command in shown.commands()] == [
            *(["docker", "run"], ["docker", "update"], ["docker", "stop"], ["docker", "rm"])
        ]
        assert "2g" in shown.command("docker", "run")
        moved = cats("replace", "--bind", "0.0.0.0")
        assert moved.code == 2
        assert "--bind cannot change while 'careful' runs (it is '127.0.0.1')" in moved.err
        callers.wait_for(10)
    assert callers.failed == []
    assert cats.containers() == {blue}
    assert docker.inspect(blue)["Id"] == before
    assert cats("status").code == 0


def test_a_replacement_that_is_cut_off_leaves_the_old_one(deploy: Make) -> None:
    cats = deploy("cut off")
    cats.start()
    (blue,) = cats.containers()
    with cats.begin("replace") as script:
        assert script.stderr is not None
        for line in script.stderr:
            if "waiting until it serves" in line:
                break
        script.send_signal(signal.SIGINT)
        script.stderr.read()
    assert script.returncode == 130
    assert cats.containers() == {blue}
    # Cut off while both serve: both stay, and the next replacement ends the older one.
    with cats.begin("replace", "--overlap", "600") as script:
        assert script.stderr is not None
        for line in script.stderr:
            if "both serve" in line:
                break
        script.kill()
        script.stderr.read()
    green = blue.replace("-blue", "-green")
    assert cats.containers() == {blue, green}
    assert cats("status").code == 0
    done = cats("replace", "--overlap", "0")
    assert done.code == 0, done.err
    assert cats.containers() == {blue}


def test_nothing_to_replace(deploy: Make) -> None:
    done = deploy("nothing")("replace")
    assert done.code == 2
    assert "nothing of 'nothing' runs: use start" in done.err


def test_callers_of_the_proxys_one_address_lose_no_call(docker: Docker, deploy: Make, proxy_image: str) -> None:
    cats = deploy("one address")
    cats.start("--proxy", "--proxy-image", proxy_image)
    names = cats.containers()
    blue, green = (
        next(name for name in names if "-blue" in name).replace("-blue", slot) for slot in ("-blue", "-green")
    )
    proxy = blue.replace("-blue", "-proxy")
    assert names == {blue, proxy}
    address = cats.callers_addresses()
    assert address == [f"127.0.0.1:{cats.ports['--grpc-port']}"]
    guarded = docker.inspect(proxy)["HostConfig"]
    assert (guarded["ReadonlyRootfs"], guarded["CapDrop"]) == (True, ["ALL"])
    ready = f"http://127.0.0.1:{cats.ports['--http-port']}/v2/health/ready"
    with Callers(address) as callers:
        callers.wait_for(10)
        for expected in (green, blue):
            done = cats("replace")
            assert done.code == 0, done.err
            callers.wait_for(10)
            assert cats.containers() == {expected, proxy}
            with urllib.request.urlopen(ready, timeout=10) as answer:
                assert answer.status == 200
        assert f"{proxy}  passing calls on" in cats("status").out
        ill = cats("replace", *UNHEALTHY)
        assert ill.code == 1
        callers.wait_for(10)
    assert callers.failed == []
    assert callers.answered > 40
    # A proxy that comes back knows by itself where calls go.
    docker("restart", proxy)
    while cats("status").code != 0:
        assert docker.inspect(proxy)["State"]["Running"]
    with Callers(address) as callers:
        callers.wait_for(10)
    docker("stop", proxy)
    assert cats("status").code == 1
    assert "the proxy does not run: stop and start" in cats("replace").err
