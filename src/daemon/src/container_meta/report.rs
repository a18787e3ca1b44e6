//! What `kruise-daemon status` shows of restarts for the environment.

use super::plan::{Memory, Restart};
use crate::live::{self, Live};
use crate::pods::PodView;
use kruise_cluster::Key;

/// The containers of a Pod that are being restarted, or wait for that.
pub fn rows(pod: &PodView, memory: &Memory) -> Vec<live::Restart> {
    let containers = pod.containers.iter();
    let running = containers.filter_map(|view| Some((&view.name, &view.status.as_ref()?.container_id)));
    let rows = running.filter_map(|(name, id)| {
        let (step, waits_for) = step(id, memory)?;
        Some(live::Restart {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: name.clone(),
            container_id: id.clone(),
            step: step.to_owned(),
            waits_for,
        })
    });
    rows.collect()
}

fn step(id: &str, memory: &Memory) -> Option<(&'static str, Option<String>)> {
    Some(match memory.restarts.get(id) {
        Some(Restart::Running(_)) => ("stopping", None),
        Some(Restart::Done) => ("starting", Some("kubelet".to_owned())),
        Some(Restart::Failed(tries, _)) => (
            "waiting",
            Some(format!("the next try to stop it, after {tries} that failed")),
        ),
        None if memory.waits.kubelet.contains_key(id) => (
            "waiting",
            Some("kubelet, which seems to replace it for its image".to_owned()),
        ),
        None => return None,
    })
}

/// Shows these rows of a Pod in place of its former ones.
pub fn show(live: &Live, key: &Key, rows: Vec<live::Restart>) {
    live.restarts.send_if_modified(|all| {
        let ours = |row: &live::Restart| {
            row.pod == key.name && Some(row.namespace.as_str()) == key.namespace.as_deref()
        };
        if all.iter().filter(|row| ours(row)).eq(&rows) {
            return false;
        }
        all.retain(|row| !ours(row));
        all.extend(rows);
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pod: &str, step: &str) -> live::Restart {
        live::Restart {
            namespace: "n".into(),
            pod: pod.into(),
            step: step.into(),
            ..live::Restart::default()
        }
    }

    #[test]
    fn rows_of_a_pod_take_the_place_of_its_former_ones_alone() {
        let (live, one, other) = (
            Live::default(),
            Key::namespaced("n", "one"),
            Key::namespaced("n", "other"),
        );
        let mut changes = live.restarts.subscribe();
        show(&live, &one, vec![row("one", "stopping")]);
        show(&live, &other, vec![row("other", "stopping")]);
        show(&live, &one, vec![row("one", "starting")]);
        assert_eq!(
            *live.restarts.borrow(),
            [row("other", "stopping"), row("one", "starting")]
        );
        changes.mark_unchanged();
        show(&live, &one, vec![row("one", "starting")]);
        assert!(
            !changes.has_changed().is_ok_and(|changed| changed),
            "nothing has changed"
        );
        show(&live, &one, Vec::new());
        assert_eq!(*live.restarts.borrow(), [row("other", "stopping")]);
    }
}
