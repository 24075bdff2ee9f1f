//! The tables, and every statement that touches them.
//!
//! | table | rows | what |
//! |---|---|---|
//! | `torchfs_format` | 1 | format version, features, cluster |
//! | `torchfs_head` | 1 | who leads, the counter of its signs of life, the last place in the log |
//! | `torchfs_log` | a group of batches each | records as in docs/disk.md, with generation 0 |
//! | `torchfs_state` | 1 | the place as of which the pairs are; a fence of its own, so that they never hold up the log |
//! | `torchfs_pair` | a pair each | the state |
//! | `torchfs_reign` | a leadership each | its fence, a random number, where its batches begin |
//! | `torchfs_server` | a metadata server each | how far its replica is |

/// The version of the tables that this code makes and knows.
pub const VERSION: i32 = 1;
/// Features that a reader must know; this code knows none.
pub const MUST_KNOWN: i64 = 0;

/// Whether the tables are there.
pub const EXISTS: &str = "SELECT to_regclass('torchfs_format') IS NOT NULL";

/// Makes the tables; a lock keeps two servers from doing it at once. `CLUSTER` is replaced by a number.
pub const CREATE: &str = "
BEGIN;
SELECT pg_advisory_xact_lock(6077124557713371);
CREATE TABLE IF NOT EXISTS torchfs_format (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    must_know bigint NOT NULL,
    may_know bigint NOT NULL,
    cluster bigint NOT NULL);
CREATE TABLE IF NOT EXISTS torchfs_head (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    fence bigint NOT NULL,
    incarnation bigint NOT NULL,
    reign bigint NOT NULL,
    address text NOT NULL,
    lease_ms bigint NOT NULL,
    counter bigint NOT NULL,
    last_seq bigint NOT NULL) WITH (fillfactor = 10);
CREATE TABLE IF NOT EXISTS torchfs_log (
    last_seq bigint PRIMARY KEY,
    first_seq bigint NOT NULL,
    fence bigint NOT NULL,
    written timestamptz NOT NULL DEFAULT now(),
    body bytea NOT NULL) WITH (toast_tuple_target = 8160);
ALTER TABLE torchfs_log ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS torchfs_state (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    fence bigint NOT NULL,
    applied bigint NOT NULL);
CREATE TABLE IF NOT EXISTS torchfs_pair (
    key bytea PRIMARY KEY,
    value bytea NOT NULL) WITH (fillfactor = 85);
ALTER TABLE torchfs_pair ALTER COLUMN value SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS torchfs_reign (
    fence bigint PRIMARY KEY,
    reign bigint NOT NULL,
    first_seq bigint NOT NULL,
    incarnation bigint NOT NULL,
    address text NOT NULL,
    since timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS torchfs_server (
    address text PRIMARY KEY,
    applied bigint NOT NULL,
    replica_bytes bigint NOT NULL,
    seen timestamptz NOT NULL DEFAULT now());
INSERT INTO torchfs_head VALUES (true, 0, 0, 0, '', 0, 0, 0) ON CONFLICT DO NOTHING;
INSERT INTO torchfs_state VALUES (true, 0, 0) ON CONFLICT DO NOTHING;
INSERT INTO torchfs_format VALUES (true, 1, 0, 0, CLUSTER) ON CONFLICT DO NOTHING;
COMMIT;
";

/// An empty log begins above fence, incarnation and place.
pub const RAISE: &str = "
WITH head AS (
    UPDATE torchfs_head SET fence = greatest(fence, $1), incarnation = greatest(incarnation, $2), last_seq = $3::bigint
    WHERE last_seq = 0 RETURNING last_seq)
UPDATE torchfs_state SET applied = head.last_seq FROM head";

/// Who made the tables.
pub const FORMAT: &str = "SELECT version, must_know, cluster FROM torchfs_format";

/// The row that all agree on.
pub const HEAD: &str =
    "SELECT fence, reign, counter, lease_ms, address, last_seq, incarnation FROM torchfs_head";

/// Appends a group: fence, last place so far, its last place, its first place, its bytes. One row says that it happened.
pub const APPEND: &str = "
WITH mine AS (
    UPDATE torchfs_head SET last_seq = $3, counter = counter + 1 WHERE fence = $1 AND last_seq = $2 RETURNING fence)
INSERT INTO torchfs_log (last_seq, first_seq, fence, body) SELECT $3::bigint, $4::bigint, fence, $5::bytea FROM mine";

/// A sign of life: fence, last place.
pub const RENEW: &str = "UPDATE torchfs_head SET counter = counter + 1 WHERE fence = $1 AND last_seq = $2";

/// Gives the lead up: fence.
pub const RELEASE: &str = "UPDATE torchfs_head SET counter = counter + 1, address = '' WHERE fence = $1";

/// Takes the lead: the fence and counter seen, a random number, the address, the term, the time in seconds.
pub const TAKE_OVER: &str = "
WITH head AS (
    UPDATE torchfs_head SET fence = fence + 1, incarnation = greatest(incarnation + 1, $6::bigint), reign = $3::bigint, address = $4::text,
        lease_ms = $5, counter = counter + 1
    WHERE fence = $1 AND counter = $2 RETURNING fence, incarnation, last_seq),
state AS (UPDATE torchfs_state SET fence = head.fence FROM head)
INSERT INTO torchfs_reign (fence, reign, first_seq, incarnation, address)
SELECT fence, $3::bigint, last_seq + 1, incarnation, $4::text FROM head RETURNING fence, incarnation, first_seq";

/// The leadership of a fence, and where the next one began.
pub const REIGN: &str = "
SELECT reign, (SELECT min(first_seq) FROM torchfs_reign later WHERE later.fence > this.fence)
FROM torchfs_reign this WHERE fence = $1";

/// Groups that end after a place, at most this many bytes (or one).
pub const GROUPS: &str = "
SELECT last_seq, first_seq, fence, body FROM (
    SELECT last_seq, first_seq, fence, body, sum(octet_length(body)) OVER (ORDER BY last_seq) - octet_length(body) AS before
    FROM (SELECT * FROM torchfs_log WHERE last_seq > $1 ORDER BY last_seq LIMIT 512) part) sized
WHERE before < $2::bigint ORDER BY last_seq";

/// As of which place the pairs are.
pub const STATE: &str = "SELECT applied FROM torchfs_state";

/// Changes pairs: fence, the place they are as of then, keys that go, keys and values that come, the place they are as of now.
/// Says 1 if it happened.
pub const CHANGE_PAIRS: &str = "
WITH mine AS (UPDATE torchfs_state SET applied = $2 WHERE fence = $1 AND applied = $6 RETURNING fence),
gone AS (DELETE FROM torchfs_pair USING mine WHERE key = ANY ($3::bytea[])),
come AS (
    INSERT INTO torchfs_pair (key, value) SELECT k, v FROM mine, unnest($4::bytea[], $5::bytea[]) AS pair (k, v)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value)
SELECT count(*) FROM mine";

/// Pairs behind a key, at most this many bytes (or one).
pub const PAIRS: &str = "
SELECT key, value FROM (
    SELECT key, value, sum(octet_length(key) + octet_length(value)) OVER (ORDER BY key) - octet_length(value) AS before
    FROM (SELECT * FROM torchfs_pair WHERE key > $1 ORDER BY key LIMIT 8192) part) sized
WHERE before < $2::bigint + octet_length(key) ORDER BY key";

/// About how many pairs there are.
pub const PAIRS_ABOUT: &str =
    "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'torchfs_pair'::regclass";

/// Removes groups of the log: fence, up to this place, older than so many milliseconds; none that the pairs do not hold.
pub const PRUNE: &str = "
DELETE FROM torchfs_log WHERE last_seq IN (
    SELECT last_seq FROM torchfs_log
    WHERE last_seq <= $2 AND written < now() - $3::double precision * interval '1 millisecond'
        AND last_seq <= (SELECT applied FROM torchfs_state WHERE fence = $1)
    ORDER BY last_seq LIMIT 10000)";

/// How far this server is: address, place, bytes of its replica.
pub const REGISTER: &str = "
INSERT INTO torchfs_server (address, applied, replica_bytes) VALUES ($1, $2, $3)
ON CONFLICT (address) DO UPDATE SET applied = excluded.applied, replica_bytes = excluded.replica_bytes, seen = now()";

/// How far all are, with the milliseconds since they said so, and since when the leader leads.
pub const SERVERS: &str = "
SELECT address, applied, replica_bytes, (extract(epoch FROM now() - seen) * 1000)::bigint FROM torchfs_server
WHERE seen > now() - interval '1 day' ORDER BY address LIMIT 64";

/// Bytes of the log and of the pairs, in all their files.
pub const SIZES: &str =
    "SELECT pg_total_relation_size('torchfs_log'), pg_total_relation_size('torchfs_pair')";

/// How durable a commit is here.
pub const DURABILITY: &str = "SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')";
