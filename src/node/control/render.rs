//! The status as text: tables for people, JSON for scripts.

use std::fmt::Write;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::v1::pull::Phase;
use super::v1::{Pull, Recreate, RecreateContainer, Restart, Runtime};

/// All that the daemon says of itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Status {
    pub(super) pulls: Vec<Pull>,
    pub(super) recreates: Vec<Recreate>,
    pub(super) restarts: Vec<Restart>,
    pub(super) runtimes: Vec<Runtime>,
}

pub(super) fn table(status: &Status) -> String {
    let mut text = String::new();
    section(
        &mut text,
        "RUNTIME",
        &["NAME", "VERSION", "SOCKET", "STATE"],
        status.runtimes.iter().map(runtime_row),
    );
    section(
        &mut text,
        "PULLS",
        &["IMAGE", "PHASE", "PROGRESS", "SPEED", "LEFT", "FOR", "NOTE"],
        status.pulls.iter().map(pull_row),
    );
    let rows = status.recreates.iter().flat_map(recreate_rows);
    section(
        &mut text,
        "RECREATES",
        &["REQUEST", "POD", "PHASE", "CONTAINER", "STEP", "WAITS FOR"],
        rows,
    );
    section(
        &mut text,
        "RESTARTS FOR THE ENVIRONMENT",
        &["POD", "CONTAINER", "STEP", "WAITS FOR"],
        status.restarts.iter().map(restart_row),
    );
    text
}

/// A title, a header and aligned rows; "none" where there are no rows.
fn section<const N: usize>(
    text: &mut String,
    title: &str,
    header: &[&str; N],
    rows: impl Iterator<Item = [String; N]>,
) {
    let rows: Vec<[String; N]> = rows.collect();
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
    for row in std::iter::once(header.map(str::to_owned)).chain(rows) {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        let _ = writeln!(text, "  {}", cells.join("   ").trim_end());
    }
    text.push('\n');
}

fn runtime_row(runtime: &Runtime) -> [String; 4] {
    let mark = if runtime.healthy { "ok" } else { "NOT OK" };
    let state = if runtime.message.is_empty() {
        mark.to_owned()
    } else {
        format!("{mark}: {}", runtime.message)
    };
    [
        dash(&runtime.name),
        dash(&runtime.version),
        runtime.socket.clone(),
        state,
    ]
}

fn pull_row(pull: &Pull) -> [String; 7] {
    let note = if pull.waits_for.is_empty() {
        pull.message.clone()
    } else {
        format!("waits for {}", pull.waits_for)
    };
    let speed = if pull.bytes_per_second > 0 {
        format!("{}/s", bytes(pull.bytes_per_second))
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
        dash(&pull.owners.join(",")),
        note,
    ]
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

/// A bar of twenty places with the bytes behind it.
fn progress(pull: &Pull) -> String {
    let total = match (pull.phase(), pull.bytes_total) {
        (Phase::Succeeded, 0) => return "done".into(),
        (_, 0) => {
            return if pull.bytes_done > 0 {
                bytes(pull.bytes_done)
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
        bytes(total)
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
            dash(waits),
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
        dash(&restart.waits_for),
    ]
}

fn dash(text: &str) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        text.to_owned()
    }
}

/// Bytes in the unit that leaves one to three digits before the point.
fn bytes(count: u64) -> String {
    let mut scaled = u128::from(count) * 10;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if scaled < 10_240 {
            let tenths = if unit == "B" {
                String::new()
            } else {
                format!(".{}", scaled % 10)
            };
            return format!("{}{tenths} {unit}", scaled / 10);
        }
        scaled /= 1024;
    }
    format!("{}.{} TiB", scaled / 10, scaled % 10)
}

pub(super) fn json(status: &Status) -> Value {
    json!({
        "runtimes": status.runtimes.iter().map(|r| json!({
            "name": r.name, "version": r.version, "socket": r.socket, "healthy": r.healthy, "message": r.message,
        })).collect::<Vec<_>>(),
        "pulls": status.pulls.iter().map(|p| json!({
            "image": p.image, "phase": phase(p), "owners": p.owners, "waitsFor": p.waits_for,
            "bytesDone": p.bytes_done, "bytesTotal": p.bytes_total, "bytesPerSecond": p.bytes_per_second,
            "secondsLeft": p.seconds_left, "attempt": p.attempt, "startedAt": time(p.started_at), "message": p.message,
        })).collect::<Vec<_>>(),
        "recreates": status.recreates.iter().map(|r| json!({
            "namespace": r.namespace, "name": r.name, "pod": r.pod, "phase": r.phase, "waitsFor": r.waits_for,
            "seenAt": time(r.seen_at), "deadline": time(r.deadline),
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

fn time(at: Option<prost_types::Timestamp>) -> Option<String> {
    let at = at?;
    Some(Timestamp::new(at.seconds, at.nanos).ok()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let pull = |image: &str, phase: Phase, done, total| Pull {
            image: image.into(),
            phase: phase.into(),
            bytes_done: done,
            bytes_total: total,
            ..Pull::default()
        };
        Status {
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
                    waits_for: "a free slot (5 of 5 in use)".into(),
                    ..pull("redis:7", Phase::Waiting, 0, 0)
                },
                pull("busybox:1.36", Phase::Succeeded, 0, 0),
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
    fn the_table_reads_well() {
        insta::assert_snapshot!(table(&status()), @r"
        RUNTIME
          NAME         VERSION   SOCKET                                   STATE
          containerd   1.7.24    /hostvarrun/containerd/containerd.sock   ok

        PULLS
          IMAGE          PHASE       PROGRESS                                  SPEED       LEFT   FOR        NOTE
          nginx:alpine   Pulling     [######..............]  33% of 36.0 MiB   4.0 MiB/s   6s     shop/web
          redis:7        Waiting     -                                         -           -      -          waits for a free slot (5 of 5 in use)
          busybox:1.36   Succeeded   done                                      -           -      -

        RECREATES: none

        RESTARTS FOR THE ENVIRONMENT
          POD          CONTAINER   STEP       WAITS FOR
          shop/web-x   app         starting   kubelet
        ");
    }

    #[test]
    fn json_names_are_stable() {
        let value = json(&status());
        assert_eq!(value["pulls"][0]["secondsLeft"], 6);
        assert_eq!(value["pulls"][1]["waitsFor"], "a free slot (5 of 5 in use)");
        assert_eq!(value["runtimes"][0]["healthy"], true);
        assert_eq!(value["restarts"][0]["containerID"], "containerd://1");
    }

    #[test]
    fn byte_counts_keep_their_size() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (300 << 20, "300.0 MiB"),
            (3 << 40, "3.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
