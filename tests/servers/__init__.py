"""Real parts of a cluster, started by the tests themselves: ZooKeeper, bookies, Oxia.

Tests on them carry `pytest.mark.cluster` and run in `make test-all`.  They need Java 17 with
Maven, and Go for Oxia; without these they are skipped, and fail where `CI=true`.  The fixtures are
in `fixtures.py` and known to every test:

==================  ========  =====================================================================
`zookeeper`         session   a `ZooKeeperServer`
`zookeeper_chroot`  function  path of an empty node on it: a whole tree for one test
`oxia`              session   an `OxiaServer` of 4 shards
`fresh_oxia`        function  one of its own for the test, empty: it starts in a fifth of a second
`bookies`           session   a `BookieCluster` of three on `zookeeper`
`start_bookies`     function  starts clusters of its own for a test: of another size, with other
                              settings, or on another root (`OnZooKeeper`, `OnZooKeeperAsPulsar`,
                              `OnOxia`)
`bookkeeper_peer`   session   a `BookKeeperPeer`: the Java client of BookKeeper
==================  ========  =====================================================================

Each server is a `ChildProcess`: `start`, `stop`, `restart` wait until it serves or is gone; `kill`,
`pause`, `resume` act at once.  Their methods belong to no event loop: what a session fixture
started can be broken in any test.  Who breaks a part of the session mends it in a `finally`:
`await zookeeper.restart()`, `await bookies.mend()`.  Stop bookies before the store they are on.
A test that kills a Java writer makes a `BookKeeperPeer(tmp_path)` of its own.  What brokers stand
on as a whole, one ZooKeeper server and three bookies, is `new_ground` in `ground.py`.
"""
