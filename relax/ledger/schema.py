"""The tables of the ledger. Plain SQLite: any tool reads it, also while the run writes."""

SCHEMA_VERSION = 1

# Times are Unix seconds. A draw is one (group, attempt) of one lineage; its row tells the last lease of its life, the
# leases before are in `events`. `batch` of a trained group is the batch that trained it, of a dropped one the trainer's
# version when it was dropped: what a cut at batch c revives is `ended_at IS NULL OR batch >= c`, except for a drop with
# the reason `surplus`: its prompt is a group of a higher id already, with the same attempt, drawn in the same turn.
SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE lineages (
    lineage     INTEGER PRIMARY KEY,
    parent      INTEGER REFERENCES lineages,  -- the lineage that was resumed
    first_batch INTEGER NOT NULL,             -- the cut: what the parent trained before it is inherited
    opened_at   REAL NOT NULL
);

CREATE TABLE groups (
    lineage    INTEGER NOT NULL,
    group_id   INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    state      TEXT NOT NULL,
    prompt_id  INTEGER NOT NULL,
    epoch      INTEGER NOT NULL,
    position   INTEGER NOT NULL,  -- of the prompt in its epoch
    fence      INTEGER NOT NULL,  -- issues so far
    holder     TEXT,              -- the replica that has the lease
    location   TEXT,              -- the service that reported last
    version    INTEGER,           -- the replica's version at issue
    oldest     INTEGER,           -- oldest version that sampled any of its tokens
    tokens     INTEGER,
    batch      INTEGER,
    reason     TEXT,              -- of a drop
    drawn_at        REAL NOT NULL,
    first_issued_at REAL,
    issued_at       REAL,
    sampled_at      REAL,
    scored_at       REAL,
    ready_at        REAL,
    committed_at    REAL,
    ended_at        REAL,
    PRIMARY KEY (lineage, group_id, attempt)
) WITHOUT ROWID;
CREATE INDEX open_groups ON groups (lineage, state) WHERE ended_at IS NULL;
-- The database itself refuses a group that is trained twice in a lineage.
CREATE UNIQUE INDEX trained_once ON groups (lineage, group_id) WHERE state = 'trained';

CREATE TABLE batches (
    lineage      INTEGER NOT NULL,
    batch        INTEGER NOT NULL,
    size         INTEGER NOT NULL,  -- in groups
    oldest       INTEGER,           -- oldest version among its tokens; staleness max = batch - oldest
    committed_at REAL,              -- none of these while its commit is taken back
    started_at   REAL,
    trained_at   REAL,
    PRIMARY KEY (lineage, batch)
) WITHOUT ROWID;

CREATE TABLE versions (
    lineage      INTEGER NOT NULL,
    version      INTEGER NOT NULL,
    step         INTEGER NOT NULL,
    digest       TEXT NOT NULL,
    bytes        INTEGER NOT NULL,
    created_at   REAL NOT NULL,
    published_at REAL NOT NULL,
    PRIMARY KEY (lineage, version)
) WITHOUT ROWID;

-- What leaves the straight way: lost leases, groups parked with their tokens, commits taken back.
CREATE TABLE events (
    event_id INTEGER PRIMARY KEY,
    time     REAL NOT NULL,
    lineage  INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    attempt  INTEGER NOT NULL,
    fence    INTEGER NOT NULL,
    event    TEXT NOT NULL,  -- lost, parked, taken_back
    state    TEXT NOT NULL,  -- the state it left
    holder   TEXT,
    batch    INTEGER,
    detail   TEXT
);

-- Stale reports by reason.
CREATE TABLE counters (
    lineage INTEGER NOT NULL,
    name    TEXT NOT NULL,
    value   INTEGER NOT NULL,
    PRIMARY KEY (lineage, name)
) WITHOUT ROWID;

CREATE VIEW conservation AS
    SELECT lineage,
           count(*) AS issued,
           sum(state = 'trained') AS trained,
           sum(state = 'dropped') AS dropped,
           sum(ended_at IS NULL) AS in_flight
    FROM groups WHERE first_issued_at IS NOT NULL GROUP BY lineage;

PRAGMA user_version = {SCHEMA_VERSION};
"""


def _upsert(table: str, key: str, columns: str) -> str:
    names = f"{key}, {columns}"
    marks = ", ".join("?" for _ in names.split(","))
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns.split(", "))
    return f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {changes}"


UPSERT_GROUP = _upsert(
    "groups",
    "lineage, group_id, attempt",
    "state, prompt_id, epoch, position, fence, holder, location, version, oldest, tokens, batch, reason, "
    "drawn_at, first_issued_at, issued_at, sampled_at, scored_at, ready_at, committed_at, ended_at",
)
UPSERT_BATCH = _upsert("batches", "lineage, batch", "size, oldest, committed_at, started_at, trained_at")
UPSERT_VERSION = _upsert("versions", "lineage, version", "step, digest, bytes, created_at, published_at")
UPSERT_COUNTER = _upsert("counters", "lineage, name", "value")
INSERT_EVENT = (
    "INSERT INTO events (time, lineage, group_id, attempt, fence, event, state, holder, batch, detail) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
