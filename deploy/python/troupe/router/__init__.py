"""One OpenAI-compatible front before any number of prefill and decode engines.

    troupe router                                       # the engines of this machine find each other, and it finds them
    troupe router --prefill http://A:8000 --decode http://B:8000 --decode http://C:8000
    python3 -m troupe.router ...                        # the same

It places each request, has one engine compute the prompt and another one write the text, and continues elsewhere if an
engine is lost: the client sees one stream. It needs aiohttp, prometheus_client and PyYAML: `troupe-kv[router]`.

| file | subject |
| --- | --- |
| settings, options | what an operator says: values and bounds; a file, a command line |
| instances | the engines: their addresses, what they serve, whether they can be used |
| watch, members, roster | who is there: asked of the engines' servers, and of Troupe's supervisor |
| choice, line | which engines a request goes to, and where it waits until they have room |
| door, bodies | how many clients come in, and with how much |
| incoming | what a client wants, as far as the router has to know it |
| legs | what each engine is asked |
| said, carry | what a client has been told, and how a text is continued from there |
| upstream, events, chunks | HTTP towards the engines, the events of a stream, and what they say |
| attempts, waiting | one request, from the line to its end |
| reply, errors | what the client gets |
| front, metrics | routes, ids, counters |
| service | the process: how it starts and stops |
"""
