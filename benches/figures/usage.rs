//! Memory and CPU time of a process of a side.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::side::{Side, proc_file};

/// A line of `/proc/PID/status`, in bytes.
pub fn memory(side: &Side, pid: u32, field: &str) -> Result<u64> {
    let status = proc_file(&side.node, pid, "status")?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    let kibibytes = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kibibytes.with_context(|| format!("no {field} of process {pid}"))? * 1024)
}

/// CPU time of a process since its start.
pub fn cpu(side: &Side, pid: u32) -> Result<Duration> {
    let stat = proc_file(&side.node, pid, "stat")?;
    let fields = stat.rsplit_once(')').context("/proc has another form")?.1;
    let mut ticks = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|t| t.parse::<u64>().ok());
    // Linux counts in hundredths of a second here on every platform that Kubernetes runs on.
    Ok(Duration::from_millis(
        (ticks.next().unwrap_or_default() + ticks.next().unwrap_or_default()) * 10,
    ))
}
