//! The table.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use xtask::cluster::{KUBERNETES, run};

/// What was measured of one implementation; none where it could not be.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub job_present: Option<Duration>,
    pub job_pull_above_bare: Option<Duration>,
    pub fan_out: Option<Duration>,
    pub fan_out_bare: Option<Duration>,
    pub fan_out_cpu: Option<Duration>,
    pub fan_out_writes: Option<f64>,
    pub recreate_exit: Option<Duration>,
    pub recreate_completed: Option<Duration>,
    pub recreate_own: Option<Duration>,
    pub kubelet_restart: Option<Duration>,
    pub recreate_three: Option<Duration>,
    pub recreate_writes: Option<usize>,
    pub daemon_rss: Option<u64>,
    pub daemon_anonymous: Option<u64>,
    pub manager_rss: Option<u64>,
    pub daemon_start: Option<Duration>,
    pub daemon_size: Option<u64>,
    pub manager_size: Option<u64>,
}

/// Both sides.
pub struct Report {
    pub ours: Figures,
    pub peer: Option<Figures>,
}

/// A row: what, its unit, the figure to reach in that unit, and how to read it.
struct Row(&'static str, &'static str, f64, fn(&Figures) -> Option<f64>);

const MEGABYTE: f64 = 1_000_000.0;
const ROWS: [Row; 16] = [
    Row(
        "ImagePullJob, image on the node: create to completionTime",
        "s",
        0.15,
        |f| seconds(f.job_present),
    ),
    Row(
        "ImagePullJob that pulls 32 MiB: time above a bare CRI pull",
        "s",
        0.1,
        |f| seconds(f.job_pull_above_bare),
    ),
    Row("ImagePullJob over 1,000 kwok nodes", "s", 6.0, |f| {
        seconds(f.fan_out)
    }),
    Row("the same, as a multiple of the bare limit", "x", 1.3, |f| {
        Some(seconds(f.fan_out)? / seconds(f.fan_out_bare)?)
    }),
    Row("the same, spec writes per node", "", 1.0, |f| f.fan_out_writes),
    Row("the same, manager's processor time", "s", 1.0, |f| {
        seconds(f.fan_out_cpu)
    }),
    Row("recreate one container: create to task exit", "ms", 15.0, |f| {
        millis(f.recreate_exit)
    }),
    Row(
        "the same, create to Completed without kubelet's part",
        "ms",
        20.0,
        |f| millis(f.recreate_own),
    ),
    Row(
        "the same, API writes of all but kubelet, events apart",
        "",
        4.0,
        |f| Some(f.recreate_writes? as f64),
    ),
    Row("recreate three containers that take 2 s to stop", "s", 3.7, |f| {
        seconds(f.recreate_three)
    }),
    Row("daemon, resident memory, idle", "MB", 9.0, |f| {
        megabytes(f.daemon_rss)
    }),
    Row("of which anonymous", "MB", 2.0, |f| megabytes(f.daemon_anonymous)),
    Row("manager, resident memory, idle", "MB", 15.0, |f| {
        megabytes(f.manager_rss)
    }),
    Row("daemon, start to healthy and watching", "s", 0.1, |f| {
        seconds(f.daemon_start)
    }),
    Row("daemon, binary", "MB", 10.0, |f| megabytes(f.daemon_size)),
    Row("manager, binary", "MB", 15.0, |f| megabytes(f.manager_size)),
];

fn seconds(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64())
}

fn millis(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64() * 1000.0)
}

fn megabytes(bytes: Option<u64>) -> Option<f64> {
    Some(bytes? as f64 / MEGABYTE)
}

impl Report {
    /// A Markdown table: our figure, the Go one, their ratio, and what is to be reached.
    pub fn table(&self) -> String {
        let mut text =
            String::from("| Work | kruise-rs | Go | Go / ours | to reach | |\n|---|---|---|---|---|---|\n");
        for Row(what, unit, target, read) in &ROWS {
            let ours = read(&self.ours);
            let peer = self.peer.as_ref().and_then(read);
            let ratio = match (ours, peer) {
                (Some(ours), Some(peer)) if ours > 0.0 => format!("{:.1}", peer / ours),
                _ => "–".into(),
            };
            let verdict = match ours {
                Some(ours) if ours <= *target => "met".into(),
                Some(ours) => format!("missed by {} {unit}", short(ours - target)),
                None => "not measured".into(),
            };
            let show = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{} {unit}", short(v)));
            let (ours, peer) = (show(ours), show(peer));
            // Writing into a String cannot fail.
            let _ = writeln!(
                text,
                "| {what} | {ours} | {peer} | {ratio} | {} {unit} | {verdict} |",
                short(*target)
            );
        }
        let show = |time: Option<Duration>| seconds(time).map_or_else(|| "–".into(), short);
        let restart = |f: &Figures| {
            format!(
                "{} s, of kubelet's own restart {} s",
                show(f.recreate_completed),
                show(f.kubelet_restart)
            )
        };
        let peer = self
            .peer
            .as_ref()
            .map_or_else(String::new, |p| format!(" (Go: {})", restart(p)));
        let _ = writeln!(
            text,
            "\nBare limit of the 1,000 nodes: {} s. One container, create to Completed: {}{peer}.",
            show(self.ours.fan_out_bare),
            restart(&self.ours),
        );
        text
    }

    /// Writes the page; its section "Notes" is kept, for people write it.
    pub fn write(&self, file: &Path) -> Result<()> {
        let old = std::fs::read_to_string(file).unwrap_or_default();
        let notes = old.find("## Notes").map_or("", |at| &old[at..]);
        let date = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        let text = format!(
            "# Benchmarks\n\nWritten by `cargo xtask bench` on {date}. {}\n\nEach implementation had a fresh \
             one-node cluster to itself and ran as plain processes with its own service accounts. Times are medians \
             as a watching client sees them; they say something in comparison only.\n\n{}\n{notes}",
            machine(),
            self.table()
        );
        if let Some(dir) = file.parent() {
            std::fs::create_dir_all(dir)?;
        }
        Ok(std::fs::write(file, text)?)
    }
}

/// Two digits that matter.
fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 10.0 => format!("{value:.0}"),
        v if v >= 1.0 || v == 0.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(": "))
        .map_or("?", |m| m.1);
    let kernel = run("uname", &["-sr"]).unwrap_or_default();
    let runc = run("runc", &["--version"]).unwrap_or_default();
    let runc = runc.lines().next().unwrap_or_default().to_owned();
    format!(
        "{cpus} cores ({model}), {}; Kubernetes {KUBERNETES}, containerd 1.7, {runc}.",
        kernel.trim()
    )
}
