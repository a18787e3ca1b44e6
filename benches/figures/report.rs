//! The tables.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use testbed::cluster::{kubernetes, run};

use crate::rows::{AT_SIZE_ROWS, Figures, NO_TARGET, Row, SIDE_BY_SIDE_ROWS, millis, seconds};

/// What was measured.
pub enum Report {
    /// Ours, next to the Go one if that was measured.
    SideBySide(Box<(Figures, Option<Figures>)>),
    /// Ours, at sizes of its own.
    AtSize(Box<Figures>),
}

/// Headings of the page. Each kind of report rewrites its own section; people write the notes.
const HEADINGS: [&str; 3] = ["## Side by side\n", "## At size\n", "## Notes\n"];

impl Report {
    /// A Markdown table: our value, the Go one, their ratio, and the target.
    pub fn table(&self) -> String {
        match self {
            Self::SideBySide(both) => side_by_side_table(&both.0, both.1.as_ref()),
            Self::AtSize(ours) => {
                let mut text = String::from("| Work | kruise-rs | to reach | |\n|---|---|---|---|\n");
                for row in &AT_SIZE_ROWS {
                    let Row(what, unit, ..) = row;
                    let (ours, reach, verdict) = evaluate(row, ours);
                    let ours = format_value(ours, unit);
                    // Writing to a String cannot fail.
                    let _ = writeln!(text, "| {what} | {ours} | {reach} | {verdict} |");
                }
                text
            }
        }
    }

    /// Writes the report's section of the page; the others are kept.
    pub fn write(&self, file: &Path) -> Result<()> {
        let old = std::fs::read_to_string(file).unwrap_or_default();
        let (heading, command) = match self {
            Self::SideBySide(_) => (HEADINGS[0], "cargo xtask bench"),
            Self::AtSize(_) => (HEADINGS[1], "cargo xtask bench --at-size"),
        };
        let date = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        let new = format!(
            "{heading}\nWritten by `{command}` on {date}. {}\n\n{}\n",
            machine(),
            self.table()
        );
        let mut text = String::from(INTRODUCTION);
        for section_heading in HEADINGS {
            text += if section_heading == heading {
                &new
            } else {
                section(&old, section_heading)
            };
        }
        if let Some(dir) = file.parent() {
            std::fs::create_dir_all(dir)?;
        }
        Ok(std::fs::write(file, text.trim_end().to_owned() + "\n")?)
    }
}

const INTRODUCTION: &str = "# Benchmarks\n\nEach implementation has a fresh one-node cluster to itself and runs as \
    plain processes with its own service accounts. Times are as a watching client sees them; they say something in \
    comparison only.\n\n";

/// A section of the page, from its heading to the next one.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let Some(begin) = page.find(heading) else {
        return "";
    };
    let tail = &page[begin..];
    let end = tail[heading.len()..]
        .find("\n## ")
        .map(|at| at + heading.len() + 1);
    &tail[..end.unwrap_or(tail.len())]
}

fn side_by_side_table(ours: &Figures, peer: Option<&Figures>) -> String {
    let mut text =
        String::from("| Work | kruise-rs | Go | Go / ours | to reach | |\n|---|---|---|---|---|---|\n");
    for row in &SIDE_BY_SIDE_ROWS {
        let Row(what, unit, _, read) = row;
        let (ours, reach, verdict) = evaluate(row, ours);
        let peer = peer.and_then(read);
        let ratio = match (ours, peer) {
            (Some(ours), Some(peer)) if ours > 0.0 => format!("{:.1}", peer / ours),
            _ => "–".into(),
        };
        let (ours, peer) = (format_value(ours, unit), format_value(peer, unit));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {what} | {ours} | {peer} | {ratio} | {reach} | {verdict} |"
        );
    }
    let go = peer.map_or_else(String::new, |peer| {
        format!("\nThe same of Go: {}\n", details_line(peer))
    });
    let _ = writeln!(text, "\n{}\n{go}", details_line(ours));
    text
}

/// The environment of the rows.
fn details_line(f: &Figures) -> String {
    let format_time = |time: Option<Duration>| seconds(time).map_or_else(|| "–".into(), format_number);
    let format_millis = |time: Option<Duration>| millis(time).map_or_else(|| "–".into(), format_number);
    let costs = f.clone_set.unwrap_or_default();
    format!(
        "bare limit of the 1,000 nodes {} s; of the Pods {} s, {} s and {} s. One container, create to Completed: {} s, \
         of kubelet's own restart {} s. Image change of a CloneSet to new container running: {} s; of a Pod \
         without a controller: {} s. Rollout to a 300 MiB image: {} s with a longest outage of {} s, after the pull \
         ahead {} s with {} s. 1,000 Pods without webhooks: {} s, of one {} and {} ms (median and 99th percentile). \
         Bare limit of 1,000 sidecars {} s; image change of a SidecarSet to new container running: {} s, of a Pod \
         without a controller: {} s.",
        format_time(f.fan_out.map(|j| j.bare)),
        format_time(f.clone_set.map(|_| costs.up.bare)),
        format_time(f.clone_set.map(|_| costs.update.bare)),
        format_time(f.clone_set.map(|_| costs.down.bare)),
        format_time(f.recreate_completed),
        format_time(f.kubelet_restart),
        format_time(f.in_place.map(|r| r.container_started)),
        format_time(f.in_place.map(|r| r.kubelet_alone)),
        format_time(f.rollout.map(|r| r.total)),
        format_time(f.rollout.map(|r| r.outage)),
        format_time(f.rollout_ahead.map(|r| r.total)),
        format_time(f.rollout_ahead.map(|r| r.outage)),
        format_time(f.inject.map(|i| i.bare.total)),
        format_millis(f.inject.map(|i| i.bare.median)),
        format_millis(f.inject.map(|i| i.bare.p99)),
        format_time(f.sidecar_set.map(|s| s.update.bare)),
        format_time(f.sidecar_in_place.map(|r| r.container_started)),
        format_time(f.sidecar_in_place.map(|r| r.kubelet_alone)),
    )
}

/// Our value, the target, and whether it is reached.
fn evaluate(row: &Row, ours: &Figures) -> (Option<f64>, String, String) {
    let Row(_, unit, target, read) = row;
    let ours = read(ours);
    if *target == NO_TARGET {
        return (ours, "–".into(), String::new());
    }
    let verdict = match ours {
        Some(ours) if ours <= *target => "met".into(),
        Some(ours) => format!("missed by {} {unit}", format_number(ours - target)),
        None => "not measured".into(),
    };
    (ours, format_value(Some(*target), unit), verdict)
}

fn format_value(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| "–".into(), |v| format!("{} {unit}", format_number(v)))
}

/// Two significant digits.
fn format_number(value: f64) -> String {
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
    let release = kubernetes::release().unwrap_or("?");
    format!(
        "{cpus} cores ({model}), {}; Kubernetes {release}, containerd 1.7, {runc}.",
        kernel.trim()
    )
}
