use std::collections::BTreeMap;

use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::sidecarset::SidecarSetSpec;
use serde_json::{Value, json};

use crate::in_place::Pod;
use crate::revision::{Revision, RevisionAction};
use crate::sidecarset::history::{HistoryOwner, HistoryPlan, ListedRevision, encode_spec, plan};
use crate::sidecarset::set::SetView;

/// The revisions of set `S`, with UID `us`.
#[derive(Default)]
struct History {
    revisions: Vec<ListedRevision<Revision>>,
    collisions: Option<i32>,
}

fn spec(image: &str, more: &Value) -> SidecarSetSpec {
    let mut spec = json!({ "containers": [{ "name": "c", "image": image }] });
    spec.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    serde_json::from_value(spec).unwrap()
}

fn owner(kind: OwnerKind, uid: &str) -> Owner {
    Owner {
        kind,
        name: "S".to_owned(),
        uid: uid.to_owned(),
    }
}

impl History {
    fn plan(&self, spec: &SidecarSetSpec, pods: &[&Pod]) -> HistoryPlan {
        let none = BTreeMap::new();
        let owner = HistoryOwner {
            set: SetView {
                name: "S",
                resource_version: "1",
                annotations: &none,
                latest_revision: "",
                spec,
            },
            uid: "us",
            labels: &none,
            collisions: self.collisions,
        };
        plan(&owner, &self.revisions, pods)
    }

    /// Plans and writes.
    fn sync(&mut self, spec: &SidecarSetSpec, pods: &[&Pod]) -> HistoryPlan {
        let plan = self.plan(spec, pods);
        match &plan.action {
            RevisionAction::UseNewest { .. } => {}
            RevisionAction::Promote { name, number, .. } => {
                let promoted = self.revisions.iter_mut().find(|r| r.revision.name == *name);
                promoted.unwrap().revision.number = *number;
            }
            RevisionAction::Create { number } => self.revisions.push(ListedRevision {
                revision: Revision {
                    name: plan.desired.name.clone(),
                    number: *number,
                    data: plan.desired.data.clone(),
                    labels: plan.desired.labels.clone(),
                    ..Revision::default()
                },
                controller: Some(owner(OwnerKind::SidecarSet, "us")),
            }),
        }
        for listed in &mut self.revisions {
            let revision = &mut listed.revision;
            if let Some(version) = plan
                .custom_version
                .as_ref()
                .filter(|_| revision.name == plan.latest)
            {
                let key = keys::SIDECAR_SET_CUSTOM_VERSION.to_owned();
                revision.labels.insert(key, version.clone());
            }
            if plan.adopt.contains(&revision.name) {
                listed.controller = Some(owner(OwnerKind::SidecarSet, "us"));
            }
        }
        self.revisions
            .retain(|listed| !plan.delete.contains(&listed.revision.name));
        self.collisions = Some(plan.collisions);
        plan
    }

    fn numbers(&self) -> Vec<i64> {
        let mut numbers: Vec<i64> = self.revisions.iter().map(|r| r.revision.number).collect();
        numbers.sort_unstable();
        numbers
    }
}

fn pod_of(revision: &str) -> Pod {
    let record = format!(r#"{{"S":{{"hash":"h","controllerRevision":"{revision}"}}}}"#);
    Pod::from_json(&json!({ "metadata": { "annotations": { (keys::SIDECAR_SET_HASH): record } } }))
}

#[test]
fn history_keeps_the_newest_revisions() {
    let mut history = History::default();
    for version in 1..=15 {
        history.sync(&spec(&format!("i:{version}"), &json!({})), &[]);
    }
    assert_eq!(history.numbers(), (6..=15).collect::<Vec<_>>());
    let rollback = history.sync(&spec("i:12", &json!({})), &[]);
    assert!(matches!(
        rollback.action,
        RevisionAction::Promote { number: 16, .. }
    ));
    assert_eq!(history.numbers(), [6, 7, 8, 9, 10, 11, 13, 14, 15, 16]);
    let again = history.sync(&spec("i:12", &json!({})), &[]);
    assert!(matches!(again.action, RevisionAction::UseNewest { .. }));
}

#[test]
fn revisions_in_use_are_kept() {
    let mut history = History::default();
    let limit = |more: Value| {
        let mut all = json!({ "revisionHistoryLimit": 1 });
        all.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        all
    };
    let first = history
        .sync(&spec("i:1", &limit(json!({ "customVersion": "v" }))), &[])
        .latest;
    let pod = pod_of(&first);
    let second = history
        .sync(&spec("i:2", &limit(json!({ "customVersion": "v" }))), &[&pod])
        .latest;
    let by_version = json!({ "revision": { "customVersion": "v" } });
    let by_version = limit(json!({ "injectionStrategy": by_version, "customVersion": "w" }));
    let third = history.sync(&spec("i:3", &by_version), &[]).latest;
    let names = |history: &History| -> Vec<String> {
        let revisions = history.revisions.iter();
        revisions.map(|listed| listed.revision.name.clone()).collect()
    };
    // Of the revisions with that version, only the newest can be injected.
    assert_eq!(names(&history), [second.clone(), third.clone()]);
    let by_name = json!({ "revision": { "revisionName": second } });
    let fourth = history
        .sync(&spec("i:4", &limit(json!({ "injectionStrategy": by_name }))), &[])
        .latest;
    assert_eq!(names(&history), [second, fourth]);
}

#[test]
fn revisions_of_other_owners_are_not_used() {
    let wanted = spec("i:1", &json!({}));
    let name = History::default().plan(&wanted, &[]).latest;
    let listed = |controller: Option<Owner>| ListedRevision {
        revision: Revision {
            name: name.clone(),
            number: 7,
            data: encode_spec(&wanted),
            labels: [(keys::SIDECAR_SET_NAME.to_owned(), "S".to_owned())].into(),
            ..Revision::default()
        },
        controller,
    };
    for other in [owner(OwnerKind::SidecarSet, "old"), owner(OwnerKind::Other, "us")] {
        let mut history = History {
            revisions: vec![listed(Some(other))],
            collisions: None,
        };
        let plan = history.sync(&wanted, &[]);
        assert_eq!(plan.action, RevisionAction::Create { number: 1 });
        assert_ne!(plan.latest, name);
        assert_eq!(plan.collisions, 1);
        assert_eq!(history.plan(&wanted, &[]).latest, plan.latest);
    }
    let mut history = History {
        revisions: vec![listed(None)],
        collisions: None,
    };
    let plan = history.sync(&wanted, &[]);
    assert_eq!((plan.latest, plan.adopt), (name.clone(), vec![name.clone()]));
    assert!(history.plan(&wanted, &[]).adopt.is_empty());
}

#[test]
fn data_is_what_new_pods_get() {
    let set = spec(
        "i<1>",
        &json!({
            "initContainers": [], "updateStrategy": { "paused": true }, "customVersion": "v",
            "volumes": [{ "name": "v", "emptyDir": {} }],
            "patchPodMetadata": [{ "annotations": { "b": "1", "a": "2" } }],
        }),
    );
    assert_eq!(
        encode_spec(&set),
        r#"{"spec":{"$patch":"replace","containers":[{"image":"i\u003c1\u003e","name":"c","resources":{},"shareVolumePolicy":{},"upgradeStrategy":{}}],"imagePullSecrets":null,"initContainers":null,"patchPodMetadata":[{"annotations":{"a":"2","b":"1"}}],"volumes":[{"emptyDir":{},"name":"v"}]}}"#
    );
}
