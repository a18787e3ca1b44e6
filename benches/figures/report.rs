//! The tables.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use testbed::cluster::{kubernetes, run};

use crate::rows::{ALONE, BESIDE, FREE, Figures, Row, seconds};

/// What was measured.
pub enum Report {
    /// Ours, beside the Go one where that was there.
    Beside(Box<(Figures, Option<Figures>)>),
    /// Ours, at sizes of its own.
    Alone(Box<Figures>),
}

/// Headings of the page. Each kind of report has its section, which it writes anew; people write the notes.
const HEADINGS: [&str; 3] = ["## Side by side\n", "## At size\n", "## Notes\n"];

impl Report {
    /// A Markdown table: our figure, the Go one, their ratio, and what is to be reached.
    pub fn table(&self) -> String {
        match self {
            Self::Beside(both) => beside(&both.0, both.1.as_ref()),
            Self::Alone(ours) => {
                let mut text = String::from("| Work | kruise-rs | to reach | |\n|---|---|---|---|\n");
                for row in &ALONE {
                    let Row(what, unit, ..) = row;
                    let (ours, reach, verdict) = judged(row, ours);
                    let ours = show(ours, unit);
                    // Writing into a String cannot fail.
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
            Self::Beside(_) => (HEADINGS[0], "cargo xtask bench"),
            Self::Alone(_) => (HEADINGS[1], "cargo xtask bench --at-size"),
        };
        let date = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        let new = format!(
            "{heading}\nWritten by `{command}` on {date}. {}\n\n{}\n",
            machine(),
            self.table()
        );
        let mut text = String::from(INTRODUCTION);
        for kept in HEADINGS {
            text += if kept == heading {
                &new
            } else {
                section(&old, kept)
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

/// A section of the page with its heading, to the next one.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let Some(begin) = page.find(heading) else {
        return "";
    };
    let rest = &page[begin..];
    let end = rest[heading.len()..]
        .find("\n## ")
        .map(|at| at + heading.len() + 1);
    &rest[..end.unwrap_or(rest.len())]
}

fn beside(ours: &Figures, peer: Option<&Figures>) -> String {
    let mut text =
        String::from("| Work | kruise-rs | Go | Go / ours | to reach | |\n|---|---|---|---|---|---|\n");
    for row in &BESIDE {
        let Row(what, unit, _, read) = row;
        let (ours, reach, verdict) = judged(row, ours);
        let peer = peer.and_then(read);
        let ratio = match (ours, peer) {
            (Some(ours), Some(peer)) if ours > 0.0 => format!("{:.1}", peer / ours),
            _ => "–".into(),
        };
        let (ours, peer) = (show(ours, unit), show(peer, unit));
        // Writing into a String cannot fail.
        let _ = writeln!(
            text,
            "| {what} | {ours} | {peer} | {ratio} | {reach} | {verdict} |"
        );
    }
    let go = peer.map_or_else(String::new, |peer| {
        format!("\nThe same of Go: {}\n", details(peer))
    });
    let _ = writeln!(text, "\n{}\n{go}", details(ours));
    text
}

/// What the rows stand on.
fn details(f: &Figures) -> String {
    let show = |time: Option<Duration>| seconds(time).map_or_else(|| "–".into(), short);
    let life = f.clone_set.unwrap_or_default();
    format!(
        "bare limit of the 1,000 nodes {} s; of the Pods {} s, {} s and {} s. One container, create to Completed: {} s, \
         of kubelet's own restart {} s. Image change of a CloneSet to new container running: {} s; of a Pod that \
         nobody controls: {} s. Rollout to a 300 MiB image: {} s with a longest outage of {} s, after the pull \
         ahead {} s with {} s.",
        show(f.fan_out.map(|j| j.bare)),
        show(f.clone_set.map(|_| life.up.bare)),
        show(f.clone_set.map(|_| life.update.bare)),
        show(f.clone_set.map(|_| life.down.bare)),
        show(f.recreate_completed),
        show(f.kubelet_restart),
        show(f.in_place.map(|r| r.total)),
        show(f.in_place.map(|r| r.kubelet)),
        show(f.rollout.map(|r| r.total)),
        show(f.rollout.map(|r| r.outage)),
        show(f.rollout_ahead.map(|r| r.total)),
        show(f.rollout_ahead.map(|r| r.outage)),
    )
}

/// Our figure, what it should be, and whether it is.
fn judged(row: &Row, ours: &Figures) -> (Option<f64>, String, String) {
    let Row(_, unit, target, read) = row;
    let ours = read(ours);
    if *target == FREE {
        return (ours, "–".into(), String::new());
    }
    let verdict = match ours {
        Some(ours) if ours <= *target => "met".into(),
        Some(ours) => format!("missed by {} {unit}", short(ours - target)),
        None => "not measured".into(),
    };
    (ours, show(Some(*target), unit), verdict)
}

fn show(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| "–".into(), |v| format!("{} {unit}", short(v)))
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
    let release = kubernetes::release().unwrap_or("?");
    format!(
        "{cpus} cores ({model}), {}; Kubernetes {release}, containerd 1.7, {runc}.",
        kernel.trim()
    )
}
