#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use proptest::prelude::*;
use serde::Deserialize;

use kruise_api::cloneset::string_map;
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetSpec;

use super::*;
use crate::pod_admission::{self, Request};
use crate::sidecarset::resources::Quantity;
use crate::sidecarset::set::SetView;

const VECTORS: &str = include_str!("../../../../../tests/data/go/sidecarset-injection.jsonl");

/// A SidecarSet as the cluster has it.
struct Stored {
    name: String,
    annotations: BTreeMap<String, String>,
    latest_revision: String,
    spec: SidecarSetSpec,
}

impl Stored {
    fn from_json(set: &Value) -> Self {
        Self {
            name: set["metadata"]["name"].as_str().unwrap().to_owned(),
            annotations: string_map(&set["metadata"]["annotations"]),
            latest_revision: set["status"]["latestRevision"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            spec: SidecarSetSpec::deserialize(&set["spec"]).unwrap(),
        }
    }

    fn view(&self) -> SetView<'_> {
        SetView {
            name: &self.name,
            resource_version: "1",
            annotations: &self.annotations,
            latest_revision: &self.latest_revision,
            spec: &self.spec,
        }
    }
}

/// The Pod after the request of a vector, in the vector's words.
fn ours(input: &Value) -> Value {
    let mut pod = input["pod"].clone();
    let stored: Vec<Stored> = input["sidecarSets"]
        .as_array()
        .unwrap()
        .iter()
        .map(Stored::from_json)
        .collect();
    let sets: Vec<SetView<'_>> = stored.iter().map(Stored::view).collect();
    let revisions: Option<Vec<ControllerRevision>> =
        Option::deserialize(&input["controllerRevisions"]).unwrap();
    let revisions: Vec<_> = revisions.into_iter().flatten().map(Arc::new).collect();
    let namespace = pod["metadata"]["namespace"]
        .as_str()
        .unwrap_or("default")
        .to_owned();
    let known = input["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["name"] == *namespace);
    let namespace_labels = known.map(|one| string_map(&one["labels"]));
    let request = Request {
        namespace: &namespace,
        subresource: input["subResource"].as_str().unwrap(),
    };
    let cluster = Cluster {
        sets: &sets,
        namespace_labels: namespace_labels.as_ref(),
        revisions: &revisions,
    };
    let options = Options {
        sort_containers: input["sortByNameGate"] == true,
        now: Timestamp::UNIX_EPOCH,
    };
    // Percentages of vectors are 0% and 100%.
    let mut middle = || 50;
    let chain = input["chain"] == true;
    let changed = if input["operation"] != "CREATE" {
        // The caller looks at the operation.
        Ok(false)
    } else if chain {
        let options = pod_admission::Options {
            readiness_gate_for_all: input["kruisePodReadinessGate"] == true,
            enhanced_liveness: false,
            probe_markers: &[],
            inject: options,
            random_name: [0; 5],
            cluster,
        };
        pod_admission::mutate(&mut pod, &request, &options, &mut middle).map_err(|why| why.to_string())
    } else if request.subresource.is_empty() {
        inject(&mut pod, &namespace, &cluster, &options, &mut middle).map_err(|why| why.to_string())
    } else {
        Ok(false)
    };
    match changed {
        Err(error) => json!({ "error": error }),
        Ok(changed) => {
            let mut out = json!({ "skip": !changed, "annotations": pod["metadata"]["annotations"] });
            let lists = ["containers", "initContainers", "volumes", "imagePullSecrets"];
            for list in lists.into_iter().chain(chain.then_some("readinessGates")) {
                set(&mut out, &[list], pod["spec"][list].clone());
            }
            out
        }
    }
}

/// A result without what Go adds and drops of empty values, and with quantities in one notation.
fn normalized(mut out: Value) -> Value {
    normalize(&mut out);
    if let Some(annotations) = out["annotations"].as_object_mut() {
        for (key, text) in annotations {
            if key.starts_with(kruise_api::keys::SIDECAR_SET_HASH) {
                *text = masked(text.as_str().unwrap()).into();
            }
        }
    }
    out
}

fn normalize(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for list in ["limits", "requests"] {
                for (_, amount) in fields
                    .get_mut(list)
                    .and_then(Value::as_object_mut)
                    .into_iter()
                    .flatten()
                {
                    *amount = Quantity::from_json(amount).unwrap().to_string().into();
                }
            }
            fields.values_mut().for_each(normalize);
            fields.retain(|name, value| {
                let is_empty = match value {
                    Value::Null => true,
                    Value::Bool(value) => !*value && name == "readOnly",
                    Value::String(text) => text.is_empty() && matches!(name.as_str(), "value" | "type"),
                    Value::Object(fields) => {
                        fields.is_empty()
                            && matches!(name.as_str(), "resources" | "annotations" | "limits" | "requests")
                    }
                    Value::Array(items) => items.is_empty(),
                    Value::Number(_) => false,
                };
                !is_empty
            });
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        _ => {}
    }
}

/// Records with all timestamps masked.
fn masked(text: &str) -> String {
    let text = text.replace(r#""updateTimestamp":null"#, r#""updateTimestamp":"T""#);
    let mut out = String::new();
    let mut rest = text.as_str();
    let field = r#""updateTimestamp":""#;
    while let Some((before, after)) = rest.split_once(field) {
        out += before;
        out += field;
        out += "T";
        rest = after.trim_start_matches(|c| c != '"');
    }
    out + rest
}

fn has_gate_already(input: &Value) -> bool {
    let gates = input["pod"]["spec"]["readinessGates"].as_array();
    let mut gates = gates.into_iter().flatten();
    input["chain"] == true && gates.any(|gate| gate["conditionType"] == kruise_api::keys::KRUISE_POD_READY)
}

#[test]
fn injections_match_go() {
    assert_eq!(VECTORS.lines().count(), 500);
    let mut differences = Vec::new();
    for (at, line) in VECTORS.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let (ours, theirs) = (ours(&vector["in"]), vector["out"].clone());
        if theirs["error"].is_string() && ours["error"].is_string() {
            continue;
        }
        let (ours, mut theirs) = (normalized(ours), normalized(theirs));
        if has_gate_already(&vector["in"]) && ours["skip"] == true && theirs["skip"] == false {
            // Theirs counts a change that is none.
            theirs["skip"] = json!(true);
        }
        let fields = [
            "error",
            "skip",
            "annotations",
            "containers",
            "initContainers",
            "volumes",
            "imagePullSecrets",
            "readinessGates",
        ];
        for field in fields {
            if ours[field] != theirs[field] {
                differences.push(format!(
                    "{}: {field}\n  ours   {}\n  theirs {}",
                    at + 1,
                    ours[field],
                    theirs[field]
                ));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differences\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[test]
fn order_of_the_cluster_does_not_matter() {
    for line in VECTORS.lines().step_by(7) {
        let mut vector: Value = serde_json::from_str(line).unwrap();
        let expected = ours(&vector["in"]);
        for list in ["sidecarSets", "controllerRevisions", "namespaces"] {
            if let Some(items) = vector["in"][list].as_array_mut() {
                items.reverse();
            }
        }
        assert_eq!(ours(&vector["in"]), expected, "{line}");
    }
}

/// All values inside, as pointers (RFC 6901).
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(value, &format!("{at}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                pointers(value, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A value of another type anywhere in the Pod or in a revision is no crash.
    #[test]
    fn hostile_values_are_injected_or_refused(
        line in 0..500_usize,
        place in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(null), json!("x"), json!(-1), json!([]), json!({}), json!([1, "", null, []]), json!({ "": 1 }),
        ]),
    ) {
        let mut vector: Value = serde_json::from_str(VECTORS.lines().nth(line).unwrap()).unwrap();
        let input = &mut vector["in"];
        let mut places = Vec::new();
        for part in ["pod", "controllerRevisions"] {
            let revisions = part == "controllerRevisions";
            let found = &mut places;
            if !revisions {
                pointers(&input[part], &format!("/{part}"), found);
            } else if let Some(revisions) = input[part].as_array() {
                for (at, revision) in revisions.iter().enumerate() {
                    pointers(&revision["data"], &format!("/{part}/{at}/data"), found);
                }
            }
        }
        *input.pointer_mut(place.get::<String>(&places)).unwrap() = value;
        let _ = ours(input);
    }
}

fn sidecar_set(name: &str, annotations: Value, spec: Value) -> Stored {
    let mut set = json!({ "metadata": { "name": name, "annotations": annotations }, "spec": spec });
    kruise_api::json::set(
        &mut set,
        &["spec", "selector"],
        json!({ "matchLabels": { "app": "a" } }),
    );
    Stored::from_json(&set)
}

/// Names of the containers of a Pod into which these sets are injected.
fn containers(
    sets: &[Stored],
    revisions: &[Arc<ControllerRevision>],
    percent: u32,
) -> Result<Vec<String>, InjectionError> {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let cluster = Cluster {
        sets: &views,
        namespace_labels: None,
        revisions,
    };
    let options = Options {
        sort_containers: false,
        now: Timestamp::UNIX_EPOCH,
    };
    let mut pod =
        json!({ "metadata": { "labels": { "app": "a" } }, "spec": { "containers": [{ "name": "app" }] } });
    inject(&mut pod, "default", &cluster, &options, &mut || percent)?;
    let containers = pod["spec"]["containers"].as_array().unwrap().iter();
    Ok(containers
        .map(|container| container["name"].as_str().unwrap().to_owned())
        .collect())
}

#[test]
fn canary_replaces_its_base() {
    let container = |name: &str| json!({ "containers": [{ "name": name }] });
    let base = || sidecar_set("mesh", json!({}), container("old"));
    let canary = |is_canary: &str| {
        let annotations = json!({ "apps.kruise.io/sidecarset-canary": is_canary, "apps.kruise.io/sidecarset-base": "mesh" });
        sidecar_set("mesh-canary", annotations, container("new"))
    };
    let injected = |is_canary| containers(&[canary(is_canary), base()], &[], 0).unwrap();
    assert_eq!(injected("true"), ["app", "new"]);
    assert_eq!(injected("false"), ["app", "old", "new"]);
}

/// Injects this set alone.
fn inject_only(set: &Stored, pod: &mut Value) -> Result<bool, InjectionError> {
    let cluster = Cluster {
        sets: &[set.view()],
        namespace_labels: None,
        revisions: &[],
    };
    let options = Options {
        sort_containers: false,
        now: Timestamp::UNIX_EPOCH,
    };
    inject(pod, "default", &cluster, &options, &mut || 0)
}

#[test]
fn no_container_gets_the_name_of_an_init_container() {
    let hot = json!({ "name": "mesh", "upgradeStrategy": { "upgradeType": "HotUpgrade" } });
    let set = sidecar_set(
        "s",
        json!({}),
        json!({ "containers": [{ "name": "log" }, hot], "initContainers": [{ "name": "prep" }] }),
    );
    let inject_into = |container: &str, init: &str| {
        let mut pod = json!({ "metadata": { "labels": { "app": "a" } },
            "spec": { "containers": [{ "name": container }], "initContainers": [{ "name": init }] } });
        match inject_only(&set, &mut pod) {
            Err(InjectionError::NameTaken { name, .. }) => Some(name),
            other => {
                assert_eq!(other, Ok(true));
                None
            }
        }
    };
    for (container, init, taken) in [
        ("app", "own", None),
        ("log", "prep", None),
        ("mesh", "mesh", None),
        ("app", "log", Some("log")),
        ("app", "mesh-2", Some("mesh-2")),
        ("prep", "own", Some("prep")),
    ] {
        assert_eq!(
            inject_into(container, init).as_deref(),
            taken,
            "{container} {init}"
        );
    }
}

#[test]
fn strategy_decides_which_pods_get_an_older_revision() {
    let revision = |number: i64| -> ControllerRevision {
        let labels =
            json!({ "kruise.io/sidecarset-name": "mesh", "apps.kruise.io/sidecarset-custom-version": "v1" });
        let containers = json!([{ "name": format!("old-{number}") }]);
        serde_json::from_value(json!({
            "metadata": { "name": format!("mesh-{number}"), "labels": labels },
            "revision": number,
            "data": { "spec": { "$patch": "replace", "containers": containers, "volumes": null } },
        }))
        .unwrap()
    };
    let revisions = [revision(2), revision(3), revision(1)].map(Arc::new);
    let injected = |injection: Value, update: Value| {
        let set = sidecar_set(
            "mesh",
            json!({}),
            json!({
                "containers": [{ "name": "new" }],
                "injectionStrategy": { "revision": injection },
                "updateStrategy": update,
            }),
        );
        Ok(containers(&[set], &revisions, 30)?.pop().unwrap())
    };
    let named =
        |name: &str, policy: &str| json!({ "revisionName": name, "customVersion": "v1", "policy": policy });
    let version = json!({ "customVersion": "v1", "policy": "Partial" });
    let other = json!({ "matchLabels": { "app": "b" } });
    for (injection, update, expected) in [
        (json!({ "policy": "Always" }), json!({}), "new"),
        (named("mesh-1", "Always"), json!({}), "old-1"),
        (named("mesh-1", "Always"), json!({ "partition": 0 }), "old-1"),
        (named("mesh-1", "Partial"), json!({}), "new"),
        (named("mesh-1", "Partial"), json!({ "paused": true }), "old-1"),
        (version.clone(), json!({ "selector": other }), "old-3"),
        (version.clone(), json!({ "selector": {}, "partition": 5 }), "new"),
        (version.clone(), json!({ "partition": "30%" }), "new"),
        (version.clone(), json!({ "partition": "31%" }), "old-3"),
        (version, json!({ "partition": "x" }), "new"),
    ] {
        assert_eq!(
            injected(injection.clone(), update.clone()).as_deref(),
            Ok(expected),
            "{injection} {update}"
        );
    }
    assert_eq!(
        injected(named("mesh-9", "Partial"), json!({})),
        Err(InjectionError::RevisionNotFound {
            set: "mesh".to_owned(),
            revision: "mesh-9".to_owned(),
        })
    );
}

/// A Pod of 1 MiB would become one of many.
#[test]
fn copies_of_mounts_are_limited() {
    let share = |name: &str| json!({ "name": name, "shareVolumePolicy": { "type": "enabled" } });
    let mounts: Vec<Value> = (0..8000)
        .map(|n| json!({ "name": "data", "mountPath": format!("/{n}") }))
        .collect();
    let injected = |sidecars: &[&str]| {
        let containers: Vec<Value> = sidecars.iter().map(|name| share(name)).collect();
        let set = sidecar_set("log", json!({}), json!({ "containers": containers }));
        let mut pod = json!({ "metadata": { "labels": { "app": "a" } },
            "spec": { "containers": [{ "name": "app", "volumeMounts": mounts }] } });
        inject_only(&set, &mut pod)
    };
    assert_eq!(injected(&["one"]), Ok(true));
    let set = "log".to_owned();
    assert_eq!(
        injected(&["one", "two"]),
        Err(InjectionError::TooManyCopies { set })
    );
}

/// A Pod is refused for its own annotation only; the failure policy decides about that of a set.
#[test]
fn invalid_record_is_of_the_pod_only_if_no_set_wrote_it() {
    let key = keys::SIDECAR_SET_HASH;
    let injected = |own: &str, policy: &str| {
        let patches = json!([{ "annotations": { key: "junk" }, "patchPolicy": policy }]);
        let spec = json!({ "containers": [{ "name": "log" }], "patchPodMetadata": patches });
        let set = sidecar_set("s", json!({}), spec);
        let metadata = json!({ "labels": { "app": "a" }, "annotations": { key: own } });
        let mut pod = json!({ "metadata": metadata, "spec": { "containers": [{ "name": "app" }] } });
        inject_only(&set, &mut pod)
    };
    let of_pod = |value: &str| {
        let value = value.to_owned();
        Err(InjectionError::InvalidAnnotation { key, value })
    };
    let of_set = Err(InjectionError::InvalidPatch {
        key,
        value: "junk".to_owned(),
    });
    for (own, policy, expected) in [
        ("own", "Retain", &of_pod("own")),
        ("own", "Overwrite", &of_set),
        ("{}", "Overwrite", &of_set),
        ("{}", "Retain", &Ok(true)),
    ] {
        assert_eq!(&injected(own, policy), expected, "{own} {policy}");
    }
}
