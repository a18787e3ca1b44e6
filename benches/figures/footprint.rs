//! Rows on size, start and memory.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::rows::Figures;
use crate::side::{Side, proc_file};

pub fn start(side: &Side, figures: &mut Figures) -> Result<()> {
    figures.daemon_start = Some(side.daemon_start);
    figures.daemon_size = Some(side.sizes.0);
    figures.manager_size = Some(side.sizes.1);
    Ok(())
}

/// Resident memory when nothing is asked for.
pub async fn idle(side: &Side, figures: &mut Figures) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(10)).await;
    figures.daemon_rss = Some(memory(side, side.daemon, "VmRSS")?);
    figures.daemon_anonymous = Some(memory(side, side.daemon, "RssAnon")?);
    figures.manager_rss = Some(memory(side, side.manager, "VmRSS")?);
    Ok(())
}

/// A line of `/proc/PID/status`, in bytes.
pub fn memory(side: &Side, pid: u32, field: &str) -> Result<u64> {
    let status = proc_file(&side.node, pid, "status")?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    let kibibytes = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kibibytes.with_context(|| format!("no {field} of process {pid}"))? * 1024)
}

/// Processor time that a process used since its start.
pub fn cpu(side: &Side, pid: u32) -> Result<Duration> {
    let stat = proc_file(&side.node, pid, "stat")?;
    let after = stat.rsplit_once(')').context("/proc has another form")?.1;
    let mut ticks = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|t| t.parse::<u64>().ok());
    // Linux counts in hundredths of a second here on every platform that Kubernetes runs on.
    Ok(Duration::from_millis(
        (ticks.next().unwrap_or_default() + ticks.next().unwrap_or_default()) * 10,
    ))
}
