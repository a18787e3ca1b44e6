#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;

use serde::Deserialize;

use kruise_api::cloneset::string_map;
use kruise_api::json::list_items;
use kruise_api::sidecarset::SidecarSetSpec;

use super::*;
use crate::pod_admission::{self, Request};
use crate::sidecarset::resources::Quantity;

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
    let revisions: Vec<ControllerRevision> = Option::deserialize(&input["controllerRevisions"])
        .unwrap()
        .unwrap_or_default();
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
    let mut middle = || 50;
    let chain = input["chain"] == true;
    let changed = if input["operation"] != "CREATE" {
        // The caller looks at the operation.
        Ok(false)
    } else if chain {
        let options = pod_admission::Options {
            readiness_gate_for_all: input["kruisePodReadinessGate"] == true,
            enhanced_liveness: false,
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
    let mut out = String::new();
    let mut rest = text;
    let field = r#""updateTimestamp":""#;
    while let Some((before, after)) = rest.split_once(field) {
        out += before;
        out += field;
        out += "T";
        rest = after.trim_start_matches(|c| c != '"');
    }
    out + rest
}

#[test]
fn injections_match_go() {
    let vectors = include_str!("../../../../../tests/data/go/sidecarset-injection.jsonl");
    assert_eq!(vectors.lines().count(), 500);
    let mut differences = Vec::new();
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let (ours, theirs) = (ours(&vector["in"]), vector["out"].clone());
        if theirs["error"].is_string() && ours["error"].is_string() {
            continue;
        }
        let (ours, theirs) = (normalized(ours), normalized(theirs));
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
