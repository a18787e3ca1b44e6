//! The kernel's statistics of this process, under the names that every Prometheus client uses; and its limit of open
//! files.

use std::fmt;
use std::fs;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use tokio::runtime::Handle;

/// Reads `/proc` on each scrape.
#[derive(Debug)]
pub(super) struct ProcessCollector;

/// Units of times in `/proc/PID/stat`, per second: the same on every architecture that Kubernetes runs on.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Debug, PartialEq)]
struct ProcessStats {
    cpu_seconds: f64,
    /// Since the machine's boot.
    start_seconds: f64,
    resident_bytes: u64,
}

/// Reads `/proc/self/stat` and `/proc/self/status`; `None` when the kernel writes them differently.
fn parse_stats(stat: &str, status: &str) -> Option<ProcessStats> {
    // The second field is the name, which may hold spaces and brackets.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // The first field here is the third of proc(5): utime is the 14th there, stime the 15th, starttime the 22nd.
    let ticks = |nth: usize| fields.get(nth - 3)?.parse::<f64>().ok();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = resident.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(ProcessStats {
        cpu_seconds: (ticks(14)? + ticks(15)?) / TICKS_PER_SECOND,
        start_seconds: ticks(22)? / TICKS_PER_SECOND,
        resident_bytes: kilobytes.saturating_mul(1024),
    })
}

/// When the machine started, in seconds since 1970.
fn boot_time(stat: &str) -> Option<f64> {
    stat.lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

/// The soft limit of open files.
fn max_fds(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Raises the soft limit of open files to the hard one, as Go's runtime does: services commonly start with 1024, for
/// programs that call `select`.
pub fn raise_open_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        Ok((soft, hard))
    });
    match raised {
        Ok((from, to)) => tracing::debug!(from, to, "raised the limit of open files"),
        Err(why) => tracing::debug!(%why, "cannot raise the limit of open files"),
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        if let Some(sample) = parse_stats(&read("/proc/self/stat"), &read("/proc/self/status")) {
            let cpu = encoder.encode_descriptor(
                "process_cpu",
                "Processor time of this process",
                Some(&Unit::Seconds),
                MetricType::Counter,
            )?;
            ConstCounter::new(sample.cpu_seconds).encode(cpu)?;
            let bytes = encoder.encode_descriptor(
                "process_resident_memory",
                "Resident memory of this process",
                Some(&Unit::Bytes),
                MetricType::Gauge,
            )?;
            ConstGauge::new(sample.resident_bytes).encode(bytes)?;
            if let Some(boot) = boot_time(&read("/proc/stat")) {
                let start = encoder.encode_descriptor(
                    "process_start_time",
                    "When this process started, since 1970",
                    Some(&Unit::Seconds),
                    MetricType::Gauge,
                )?;
                ConstGauge::new(boot + sample.start_seconds).encode(start)?;
            }
        }
        let mut gauge = |name, help, value: Option<u64>| {
            let Some(value) = value else { return Ok(()) };
            let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(gauge)
        };
        let open = fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
        let open = open.and_then(|count| u64::try_from(count).ok());
        gauge("process_open_fds", "Open files of this process", open)?;
        let max = max_fds(&read("/proc/self/limits"));
        gauge("process_max_fds", "Most files that this process may open", max)?;
        let tasks = Handle::try_current().map(|runtime| runtime.metrics().num_alive_tasks());
        let tasks = tasks.ok().and_then(|count| u64::try_from(count).ok());
        gauge("kruise_tasks", "Tasks of this process that have not ended", tasks)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn open_file_limit_is_raised_to_the_hard_limit() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        raise_open_file_limit();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
        assert_eq!(
            max_fds(&fs::read_to_string("/proc/self/limits").unwrap()),
            Some(hard)
        );
    }

    #[test]
    fn proc_stat_is_parsed_for_any_process_name() {
        let stat =
            "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 4 0 12345 2048 99 18446744073709551615";
        let status = "Name:\ta\nVmRSS:\t    9216 kB\nThreads:\t4\n";
        let read = parse_stats(stat, status).unwrap();
        let expected = ProcessStats {
            cpu_seconds: 3.0,
            start_seconds: 123.45,
            resident_bytes: 9 << 20,
        };
        assert_eq!(read, expected);
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\n"), Some(1_700_000_000.0));
        let limits = "Limit   Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files\n";
        assert_eq!(max_fds(limits), Some(1024));
        for garbage in ["", ")", "1 (x) S", "1 (x"] {
            assert_eq!(parse_stats(garbage, status), None);
            assert_eq!(parse_stats(stat, garbage), None);
        }
    }
}
