"""The words of an implementation, or its process, that did not do what it was asked for."""


class Refused(Exception):
    pass
