"""The scripts of deploy/ on machines that are not as they would like them: apt is at work, another user has built."""
import fcntl
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import unittest

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
ANOTHER = 61_000


class Scripts(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = pathlib.Path(place.name)

    def quickstart(self):
        """What it says, run from this folder by somebody who is not root."""
        (self.folder / "deploy").mkdir()
        shutil.copy(DEPLOY / "quickstart", self.folder / "deploy")
        self.folder.chmod(0o755)
        words = ["setpriv", "--reuid", str(ANOTHER), "--clear-groups"] if os.getuid() == 0 else []
        return subprocess.run([*words, "bash", str(self.folder / "deploy/quickstart")], capture_output=True, text=True,
                              check=False)

    def test_quickstart_names_who_has_built_here_and_what_to_do(self):
        built = self.folder / "build/release"
        built.mkdir(parents=True)
        (built / "CMakeCache.txt").touch(0o444)
        if os.getuid() == 0:
            os.chown(built, ANOTHER, ANOTHER)
        ran = self.quickstart()
        self.assertEqual(ran.returncode, 1)
        owner = (built / "CMakeCache.txt").owner()
        self.assertIn(f"quickstart: {built}/CMakeCache.txt belongs to {owner}, ", ran.stderr)
        self.assertIn(f"sudo rm -rf {built}, or build in a clone of your own", ran.stderr)

    def test_quickstart_names_whose_clone_this_is(self):
        self.folder.chmod(0o755)
        if os.getuid() != 0:
            self.skipTest("only root can make a folder that is another user's")
        ran = self.quickstart()
        self.assertEqual(ran.returncode, 1)
        self.assertIn(f"quickstart: {self.folder} belongs to root, {ANOTHER} may not write there: build in a clone of "
                      "your own", ran.stderr)

    def test_install_packages_waits_for_another_apt(self):
        if os.getuid() != 0 or shutil.which("apt-get") is None:
            self.skipTest("only root can ask apt for anything")
        lists = self.folder / "lists"
        (lists / "partial").mkdir(parents=True)
        (self.folder / "sources").mkdir()
        config = self.folder / "apt.conf"
        config.write_text(f'Dir::State::Lists "{lists}"; Dir::Etc::SourceList "/dev/null";\n'
                          f'Dir::Etc::SourceParts "{self.folder}/sources"; Dir::Cache "{self.folder}";\n'
                          'APT::Sandbox::User "root";\n')
        with open(lists / "lock", "w", encoding="ascii") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            with subprocess.Popen([str(DEPLOY / "install-packages"), "--lists"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, "APT_CONFIG": str(config)}) as running:
                limit = threading.Timer(60, running.kill)
                limit.start()
                first = running.stdout.readline()
                fcntl.lockf(lock, fcntl.LOCK_UN)
                rest = running.stdout.read()
            limit.cancel()
        self.assertIn("Another apt is at work on this machine; waiting", first, rest)
        self.assertEqual(running.returncode, 0, rest)


if __name__ == "__main__":
    unittest.main()
