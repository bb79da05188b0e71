"""Processes of a test that are forked from one which has imported everything and started nothing, since imports take
ten seconds and more. A test runs functions of its room in them.
"""
import os
import select
import signal
import socket
import traceback
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle

PATIENCE = 60  # seconds, for events that must come


class Failure(Exception):
    """An error that a process reports."""


class Nursery:
    """A process that forks others. It must be created before this process starts a node, and ends with this one."""

    def __init__(self, serve, prepare=None):
        """Each forked process calls `serve` with its end of a pipe and the arguments of `fork`. The nursery calls
        `prepare` before the first fork."""
        self._orders, theirs = Pipe()
        self._handles, their_handles = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            self._handles.close()
            self._tend(theirs, their_handles, serve, prepare)
        theirs.close()
        their_handles.close()

    def fork(self, pipe, *arguments):
        """Starts a process and returns its pid."""
        self._orders.send(arguments)
        send_handle(self._handles, pipe.fileno(), self._pid)
        return self._orders.recv()

    @staticmethod
    def _tend(orders, handles, serve, prepare):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forked processes are not waited for
        try:
            if prepare:
                prepare()
            while True:
                arguments = orders.recv()
                handle = recv_handle(handles)
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    serve(Connection(handle), *arguments)
                    os._exit(0)
                os.close(handle)
                orders.send(pid)
        except EOFError:
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)


class Process:
    """One process, which runs its orders in turn; `begin` does not wait for the result, `end` does."""

    nursery = None  # set before the first one

    def __init__(self, *arguments):
        self._pipe, other = Pipe()
        self.pid = self.nursery.fork(other, *arguments)
        self._ended = os.pidfd_open(self.pid)
        other.close()

    def begin(self, function, *arguments, **named):
        self._pipe.send((function, arguments, named))

    def end(self, seconds=PATIENCE):
        if not self._pipe.poll(seconds):
            raise Failure(f"process {self.pid} says nothing for {seconds} s")
        well, said = self._pipe.recv()
        if not well:
            raise Failure(said)
        return said

    def run(self, function, *arguments, **named):
        self.begin(function, *arguments, **named)
        return self.end()

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """Does nothing the second time."""
        if self._ended is not None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)
            self._wait()

    def leave(self):
        """Ends the process in good order."""
        self._pipe.send(None)
        self._wait()

    def _wait(self):
        if not select.select([self._ended], [], [], PATIENCE)[0]:
            raise Failure(f"process {self.pid} does not end")
        os.close(self._ended)
        self._ended = None
        self._pipe.close()


def obey(pipe, state):
    """Runs the orders of the test, each with `state`, until the process is to leave or the test has ended."""
    while (order := _received(pipe)) is not None:
        function, arguments, named = order
        try:
            pipe.send((True, function(state, *arguments, **named)))
        except Exception:  # pylint: disable=broad-exception-caught
            pipe.send((False, traceback.format_exc()))


def _received(pipe):
    try:
        return pipe.recv()
    except EOFError:  # the test has ended
        return None
