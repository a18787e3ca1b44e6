//! The status as text: tables for people, JSON for scripts.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::v1::pull::Phase;
use super::v1::{Pull, Recreate, RecreateContainer, Restart, Runtime};
use kruise_api::byte_size::format_bytes;
use kruise_api::text::{printable, printable_json};

/// The complete status of the daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NodeStatus {
    pub(super) pulls: Vec<Pull>,
    pub(super) recreates: Vec<Recreate>,
    pub(super) restarts: Vec<Restart>,
    pub(super) runtimes: Vec<Runtime>,
}

/// How a table is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    /// Columns of the terminal; without one, nothing is cut.
    pub(super) width: Option<usize>,
    /// Whether every pull that has ended is listed, or the latest [`MAX_ENDED_PULLS`] alone.
    pub(super) all: bool,
}

/// Maximum number of ended pulls that are listed: a NodeImage keeps its tags as long as any job needs them.
const MAX_ENDED_PULLS: usize = 10;
/// Before each row, and between its columns.
const INDENT: &str = "  ";
const GAP: &str = "   ";
/// Characters that a column keeps, however narrow the terminal is.
const MIN_COLUMN_WIDTH: usize = 8;

pub(super) fn table(status: &NodeStatus, layout: Layout) -> String {
    let mut text = String::new();
    let width = layout.width;
    section(
        &mut text,
        "RUNTIME",
        &["NAME", "VERSION", "SOCKET", "STATE"],
        status.runtimes.iter().map(runtime_row),
        width,
    );
    let (shown, summary) = select_pulls(&status.pulls, layout.all);
    section(
        &mut text,
        "PULLS",
        &["IMAGE", "PHASE", "PROGRESS", "SPEED", "LEFT", "FOR", "NOTE"],
        shown.into_iter().map(pull_row),
        width,
    );
    if let Some(before) = summary {
        text.truncate(text.trim_end().len());
        // Writing into a String cannot fail.
        let _ = writeln!(text, "\n  {before}\n");
    }
    let rows = status.recreates.iter().flat_map(recreate_rows);
    section(
        &mut text,
        "RECREATES",
        &["REQUEST", "POD", "PHASE", "CONTAINER", "STEP", "WAITS FOR"],
        rows,
        width,
    );
    section(
        &mut text,
        "RESTARTS FOR THE ENVIRONMENT",
        &["POD", "CONTAINER", "STEP", "WAITS FOR"],
        status.restarts.iter().map(restart_row),
        width,
    );
    text
}

/// The pulls to list, and a line about older ended pulls that are hidden.
fn select_pulls(pulls: &[Pull], all: bool) -> (Vec<&Pull>, Option<String>) {
    let ended_at = |pull: &Pull| pull.ended_at.map_or((0, 0), |at| (at.seconds, at.nanos));
    let has_ended = |pull: &Pull| matches!(pull.phase(), Phase::Succeeded | Phase::Failed);
    let mut ended: Vec<usize> = (0..pulls.len())
        .filter(|i| pulls.get(*i).is_some_and(has_ended))
        .collect();
    ended.sort_by_key(|i| Reverse(pulls.get(*i).map(ended_at)));
    let older: BTreeSet<usize> = ended
        .into_iter()
        .skip(if all { usize::MAX } else { MAX_ENDED_PULLS })
        .collect();
    let (hidden, shown): (Vec<_>, Vec<_>) = pulls.iter().enumerate().partition(|(i, _)| older.contains(i));
    let failed = hidden
        .iter()
        .filter(|(_, pull)| pull.phase() == Phase::Failed)
        .count();
    let summary = (!hidden.is_empty()).then(|| {
        let succeeded = hidden.len() - failed;
        format!("Ended before these: {succeeded} succeeded, {failed} failed (--all lists them)")
    });
    (shown.into_iter().map(|(_, pull)| pull).collect(), summary)
}

/// A title, a header and aligned rows, at most `limit` characters wide; "none" if there are no rows.
fn section<const N: usize>(
    text: &mut String,
    title: &str,
    header: &[&str; N],
    rows: impl Iterator<Item = [String; N]>,
    limit: Option<usize>,
) {
    let rows: Vec<[String; N]> = rows.map(|row| row.map(|cell| printable(&cell))).collect();
    if rows.is_empty() {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{title}: none\n");
        return;
    }
    let _ = writeln!(text, "{title}");
    let mut widths = header.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    if let Some(limit) = limit {
        shrink_columns(
            &mut widths,
            limit.saturating_sub(INDENT.len() + GAP.len() * (N - 1)),
        );
    }
    for row in std::iter::once(header.map(str::to_owned)).chain(rows) {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{:<width$}", elide_middle(cell, width)))
            .collect();
        let _ = writeln!(text, "{INDENT}{}", cells.join(GAP).trim_end());
    }
    text.push('\n');
}

/// Narrows the widest columns until the total width is at most `limit` characters.
fn shrink_columns(widths: &mut [usize], limit: usize) {
    while widths.iter().sum::<usize>() > limit {
        match widths.iter_mut().max() {
            Some(widest) if *widest > MIN_COLUMN_WIDTH => *widest -= 1,
            _ => return,
        }
    }
}

/// Shortens the text to at most `width` characters. It elides the middle, because an image name ends with its tag and
/// an error with its cause.
fn elide_middle(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let head = width.saturating_sub(1) / 2;
    let tail = width.saturating_sub(1) - head;
    let first = text.chars().take(head);
    first
        .chain(['…'])
        .chain(text.chars().skip(length - tail))
        .collect()
}

/// The changes from `old` to `new`, one line each. Bytes change in steps of a tenth of the image.
pub(super) fn diff(old: &NodeStatus, new: &NodeStatus) -> String {
    let (old, new) = (status_lines(old), status_lines(new));
    let mut text = String::new();
    for (what, line) in new.iter().filter(|(what, line)| old.get(*what) != Some(line)) {
        let _ = writeln!(text, "{}", printable(format!("{what}: {line}").trim_end()));
    }
    for what in old.keys().filter(|what| !new.contains_key(*what)) {
        let _ = writeln!(text, "{}: gone", printable(what));
    }
    text
}

/// The table rows by their subject.
fn status_lines(status: &NodeStatus) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for runtime in &status.runtimes {
        let [name, version, socket, state] = runtime_row(runtime);
        lines.insert(format!("runtime {socket}"), format!("{name} {version} {state}"));
    }
    for pull in &status.pulls {
        let tenths = pull.bytes_done.saturating_mul(10).checked_div(pull.bytes_total);
        let percent = match (pull.phase(), tenths) {
            (Phase::Pulling, Some(tenths)) => format!(" {}%", tenths.min(10) * 10),
            _ => String::new(),
        };
        let line = format!("{}{percent} {}", phase(pull), note(pull));
        lines.insert(format!("pull {}", pull.image), line);
    }
    for recreate in &status.recreates {
        for [request, pod, phase, container, step, waits] in recreate_rows(recreate) {
            let what = format!("recreate {request} container {container}");
            lines.insert(what, format!("Pod {pod} {phase} {step} {waits}"));
        }
    }
    for restart in &status.restarts {
        let [pod, container, step, waits] = restart_row(restart);
        lines.insert(
            format!("restart {pod} container {container}"),
            format!("{step} {waits}"),
        );
    }
    lines
}

fn runtime_row(runtime: &Runtime) -> [String; 4] {
    let mark = if runtime.healthy { "ok" } else { "NOT OK" };
    let state = if runtime.message.is_empty() {
        mark.to_owned()
    } else {
        format!("{mark}: {}", runtime.message)
    };
    [
        or_dash(&runtime.name),
        or_dash(&runtime.version),
        runtime.socket.clone(),
        state,
    ]
}

fn pull_row(pull: &Pull) -> [String; 7] {
    let speed = if pull.bytes_per_second > 0 {
        format!("{}/s", format_bytes(pull.bytes_per_second))
    } else {
        "-".into()
    };
    let left = pull.seconds_left.map_or_else(|| "-".into(), |s| format!("{s}s"));
    [
        pull.image.clone(),
        phase(pull).to_owned(),
        progress(pull),
        speed,
        left,
        or_dash(&pull.owners.join(",")),
        note(pull),
    ]
}

fn note(pull: &Pull) -> String {
    match (pull.waits_for.as_str(), pull.message.as_str()) {
        ("", message) => message.to_owned(),
        (wait, "") => format!("waits for {wait}"),
        (wait, error) => format!("waits for {wait}; the last attempt failed: {error}"),
    }
}

fn phase(pull: &Pull) -> &'static str {
    match pull.phase() {
        Phase::Unspecified => "Unknown",
        Phase::Waiting => "Waiting",
        Phase::Pulling => "Pulling",
        Phase::Succeeded => "Succeeded",
        Phase::Failed => "Failed",
    }
}

/// A progress bar of twenty cells, followed by the bytes.
fn progress(pull: &Pull) -> String {
    let total = match (pull.phase(), pull.bytes_total) {
        (Phase::Succeeded, 0) => return "done".into(),
        (Phase::Succeeded, total) => return format!("done, {}", format_bytes(total)),
        (_, 0) => {
            return if pull.bytes_done > 0 {
                format_bytes(pull.bytes_done)
            } else {
                "-".into()
            };
        }
        (_, total) => total,
    };
    let done = pull.bytes_done.min(total);
    let filled = usize::try_from(done * 20 / total).unwrap_or(20);
    format!(
        "[{}{}] {:>3}% of {}",
        "#".repeat(filled),
        ".".repeat(20 - filled),
        done * 100 / total,
        format_bytes(total)
    )
}

fn recreate_rows(recreate: &Recreate) -> Vec<[String; 6]> {
    let request = format!("{}/{}", recreate.namespace, recreate.name);
    let row = |container: Option<&RecreateContainer>| {
        let (name, step, waits) = container.map_or(("-", "-", ""), |c| (&*c.name, &*c.step, &*c.waits_for));
        let waits = if waits.is_empty() {
            &recreate.waits_for
        } else {
            waits
        };
        [
            request.clone(),
            recreate.pod.clone(),
            recreate.phase.clone(),
            name.to_owned(),
            step.to_owned(),
            or_dash(waits),
        ]
    };
    if recreate.containers.is_empty() {
        return vec![row(None)];
    }
    recreate.containers.iter().map(|c| row(Some(c))).collect()
}

fn restart_row(restart: &Restart) -> [String; 4] {
    [
        format!("{}/{}", restart.namespace, restart.pod),
        restart.container.clone(),
        restart.step.clone(),
        or_dash(&restart.waits_for),
    ]
}

fn or_dash(text: &str) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        text.to_owned()
    }
}

/// The status as JSON, on one line that is safe for a terminal: messages may be those of a registry.
pub(super) fn json_line(status: &NodeStatus) -> String {
    format!("{}\n", printable_json(&to_json(status).to_string()))
}

fn to_json(status: &NodeStatus) -> Value {
    json!({
        "runtimes": status.runtimes.iter().map(|r| json!({
            "name": r.name, "version": r.version, "socket": r.socket, "healthy": r.healthy, "message": r.message,
        })).collect::<Vec<_>>(),
        "pulls": status.pulls.iter().map(|p| json!({
            "image": p.image, "phase": phase(p), "owners": p.owners, "waitsFor": p.waits_for,
            "bytesDone": p.bytes_done, "bytesTotal": p.bytes_total, "bytesPerSecond": p.bytes_per_second,
            "secondsLeft": p.seconds_left, "attempt": p.attempt, "startedAt": rfc3339(p.started_at), "endedAt": rfc3339(p.ended_at),
            "message": p.message,
        })).collect::<Vec<_>>(),
        "recreates": status.recreates.iter().map(|r| json!({
            "namespace": r.namespace, "name": r.name, "pod": r.pod, "phase": r.phase, "waitsFor": r.waits_for,
            "seenAt": rfc3339(r.seen_at), "deadline": rfc3339(r.deadline),
            "containers": r.containers.iter().map(|c| json!({
                "name": c.name, "step": c.step, "waitsFor": c.waits_for,
                "oldContainerID": c.old_container_id, "newContainerID": c.new_container_id,
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "restarts": status.restarts.iter().map(|r| json!({
            "namespace": r.namespace, "pod": r.pod, "container": r.container, "containerID": r.container_id,
            "step": r.step, "waitsFor": r.waits_for,
        })).collect::<Vec<_>>(),
    })
}

fn rfc3339(timestamp: Option<prost_types::Timestamp>) -> Option<String> {
    let at = timestamp?;
    Some(Timestamp::new(at.seconds, at.nanos).ok()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_pull::plan::status::waits_for;
    use crate::image_pull::plan::{PullLimits, PullStage};

    /// The status text for what a pull in that stage waits for.
    fn stage_waits_for(stage: PullStage) -> String {
        waits_for(&stage, &PullLimits::for_node(5, true)).unwrap_or_default()
    }

    fn status() -> NodeStatus {
        let pull = |image: &str, phase: Phase, done, total| Pull {
            image: image.into(),
            phase: phase.into(),
            bytes_done: done,
            bytes_total: total,
            ..Pull::default()
        };
        NodeStatus {
            runtimes: vec![Runtime {
                name: "containerd".into(),
                version: "1.7.24".into(),
                socket: "/hostvarrun/containerd/containerd.sock".into(),
                healthy: true,
                message: String::new(),
            }],
            pulls: vec![
                Pull {
                    owners: vec!["shop/web".into()],
                    bytes_per_second: 4 << 20,
                    seconds_left: Some(6),
                    ..pull("nginx:alpine", Phase::Pulling, 12 << 20, 36 << 20)
                },
                Pull {
                    waits_for: stage_waits_for(PullStage::Waiting),
                    ..pull("redis:7", Phase::Waiting, 0, 0)
                },
                Pull {
                    waits_for: stage_waits_for(PullStage::BackOff {
                        until: Timestamp::UNIX_EPOCH,
                    }),
                    message: "no such image\u{1b}[2J".into(),
                    ..pull("httpd:2", Phase::Pulling, 0, 0)
                },
                pull("busybox:1.36", Phase::Succeeded, 0, 0),
                pull("alpine:3", Phase::Succeeded, 97 << 20, 97 << 20),
            ],
            recreates: vec![],
            restarts: vec![Restart {
                namespace: "shop".into(),
                pod: "web-x".into(),
                container: "app".into(),
                container_id: "containerd://1".into(),
                step: "starting".into(),
                waits_for: "kubelet".into(),
            }],
        }
    }

    #[test]
    fn status_table_snapshot() {
        insta::assert_snapshot!(table(&status(), Layout::default()), @r"
        RUNTIME
          NAME         VERSION   SOCKET                                   STATE
          containerd   1.7.24    /hostvarrun/containerd/containerd.sock   ok

        PULLS
          IMAGE          PHASE       PROGRESS                                  SPEED       LEFT   FOR        NOTE
          nginx:alpine   Pulling     [######..............]  33% of 36.0 MiB   4.0 MiB/s   6s     shop/web
          redis:7        Waiting     -                                         -           -      -          waits for one of 5 pull slots of this node, of which one namespace has 4 at most
          httpd:2        Pulling     -                                         -           -      -          waits for its next attempt at 1970-01-01T00:00:00Z; the last attempt failed: no such image\u{1b}[2J
          busybox:1.36   Succeeded   done                                      -           -      -
          alpine:3       Succeeded   done, 97.0 MiB                            -           -      -

        RECREATES: none

        RESTARTS FOR THE ENVIRONMENT
          POD          CONTAINER   STEP       WAITS FOR
          shop/web-x   app         starting   kubelet
        ");
    }

    #[test]
    fn status_table_fits_the_terminal() {
        let mut wide = status();
        wide.pulls[0].image = format!("registry.example.com/{}/web:1.2.3", "team/".repeat(40));
        for width in [80, 120, 200] {
            let layout = Layout {
                width: Some(width),
                all: true,
            };
            let text = table(&wide, layout);
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest.is_some_and(|long| long <= width), "{width}:\n{text}");
        }
        let narrow = Layout {
            width: Some(120),
            all: true,
        };
        let text = table(&wide, narrow);
        assert!(text.contains("…") && text.contains("eb:1.2.3"), "{text}");
        assert!(table(&wide, Layout::default()).contains(&wide.pulls[0].image));
        assert_eq!(elide_middle("0123456789", 5), "01…89");
        let no_room = Layout {
            width: Some(0),
            all: true,
        };
        assert!(table(&wide, no_room).contains("IMAGE"));
    }

    #[test]
    fn only_latest_ended_pulls_are_listed() {
        let pull = |n: i64, phase: Phase| Pull {
            image: format!("image:{n}"),
            phase: phase.into(),
            ended_at: (phase != Phase::Pulling).then_some(prost_types::Timestamp { seconds: n, nanos: 0 }),
            ..Pull::default()
        };
        let mut pulls: Vec<Pull> = (10..30).map(|n| pull(n, Phase::Succeeded)).collect();
        pulls[3] = pull(13, Phase::Failed);
        pulls.push(pull(5, Phase::Pulling));
        let status = NodeStatus {
            pulls,
            ..NodeStatus::default()
        };
        let text = table(&status, Layout::default());
        assert!(
            !text.contains("image:19 ") && text.contains("image:20 "),
            "{text}"
        );
        assert!(text.contains("image:29 ") && text.contains("image:5 "), "{text}");
        let line = "\n  Ended before these: 9 succeeded, 1 failed (--all lists them)\n\nRECREATES";
        assert!(text.contains(line), "{text}");
        let all = Layout {
            width: None,
            all: true,
        };
        let text = table(&status, all);
        assert!(
            text.contains("image:10 ") && !text.contains("Ended before"),
            "{text}"
        );
    }

    #[test]
    fn watch_prints_changes_and_bytes_in_tenths() {
        let old = status();
        assert_eq!(diff(&old, &old), "");
        let mut new = old.clone();
        new.pulls[0].bytes_done += 1;
        new.pulls[1].waits_for.clear();
        new.pulls[1].set_phase(Phase::Pulling);
        new.restarts.clear();
        assert_eq!(
            diff(&old, &new),
            "pull redis:7: Pulling\nrestart shop/web-x container app: gone\n"
        );
        new.pulls[0].bytes_done = 18 << 20;
        assert!(diff(&old, &new).starts_with("pull nginx:alpine: Pulling 50%\n"));
        assert_eq!(diff(&NodeStatus::default(), &old).lines().count(), 7);
    }

    #[test]
    fn status_json_names_are_stable() {
        let value = to_json(&status());
        assert_eq!(value["pulls"][0]["secondsLeft"], 6);
        let waits = "one of 5 pull slots of this node, of which one namespace has 4 at most";
        assert_eq!(value["pulls"][1]["waitsFor"], waits);
        assert_eq!(value["runtimes"][0]["healthy"], true);
        assert_eq!(value["restarts"][0]["containerID"], "containerd://1");
    }

    #[test]
    fn status_json_cannot_control_the_terminal() {
        let mut status = status();
        status.pulls[2].message = "denied\u{9b}2J\u{202e}".into();
        let line = json_line(&status);
        assert!(line.contains(r"denied\u009b2J\u202e"), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).ok(), Some(to_json(&status)));
        assert_eq!((line.lines().count(), line.ends_with('\n')), (1, true));
    }
}
