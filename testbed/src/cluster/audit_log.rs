//! The audit log of an API server, read and parsed as it grows: tests read it again and again.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use serde_json::Value;

/// Prefix of the field manager of dry-run writes that mark the end of the log.
pub(super) const MARK_PREFIX: &str = "audit-mark-";

/// The audit log of one API server, which may restart.
pub(super) struct AuditLog {
    path: PathBuf,
    seen: Mutex<Seen>,
}

/// What was read so far.
#[derive(Default)]
struct Seen {
    /// Bytes of whole lines.
    bytes: u64,
    events: Vec<Value>,
    /// Lines of marks.
    marks: Vec<String>,
}

impl AuditLog {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            seen: Mutex::default(),
        }
    }

    /// Whether the log has this mark.
    pub(super) fn has_mark(&self, mark: &str) -> Result<bool> {
        let seen = self.read()?;
        Ok(seen.marks.iter().any(|line| line.contains(mark)))
    }

    /// The events that count, without marks.
    pub(super) fn events(&self, counts: impl Fn(&Value) -> bool) -> Result<Vec<Value>> {
        let seen = self.read()?;
        Ok(seen
            .events
            .iter()
            .filter(|event| counts(event))
            .cloned()
            .collect())
    }

    fn read(&self) -> Result<MutexGuard<'_, Seen>> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(seen.bytes))?;
        let mut lines = Vec::new();
        file.read_to_end(&mut lines)?;
        // The last line may be incomplete.
        let end = lines.iter().rposition(|byte| *byte == b'\n');
        lines.truncate(end.map_or(0, |end| end + 1));
        for line in String::from_utf8_lossy(&lines).lines() {
            if line.contains(MARK_PREFIX) {
                seen.marks.push(line.to_owned());
            } else {
                seen.events.extend(serde_json::from_str::<Value>(line).ok());
            }
        }
        seen.bytes += u64::try_from(lines.len())?;
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use serde_json::json;

    use super::*;

    #[test]
    fn each_line_is_read_once_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let mut file = File::create(&path).unwrap();
        let log = AuditLog::new(path);
        let all = || log.events(|_| true).unwrap();
        assert_eq!(all(), Vec::<Value>::new());
        file.write_all(b"{\"a\":1}\n{\"a\"").unwrap();
        assert_eq!(all(), [json!({ "a": 1 })]);
        file.write_all(b":2}\n{\"by\":\"audit-mark-7-\"}\n").unwrap();
        assert_eq!(all(), [json!({ "a": 1 }), json!({ "a": 2 })]);
        assert_eq!(log.events(|event| event["a"] == 2).unwrap(), [json!({ "a": 2 })]);
        assert!(log.has_mark("audit-mark-7-").unwrap());
        assert!(!log.has_mark("audit-mark-8-").unwrap());
    }
}
