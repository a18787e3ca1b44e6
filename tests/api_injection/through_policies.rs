//! What policies make of a Pod is what the function makes of it, for the vectors of the Go implementation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt, stream};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_workload::sidecarset::policy::{self, compile};
use kruise_workload::sidecarset::recorded::{HashFormat, parse_with_format};
use kruise_workload::sidecarset::resources::Quantity;
use serde_json::{Value, json};

use crate::cluster::InjectionCluster;
use crate::stored::Stored;
use crate::vectors::{Case, LINE, Outcome, Report, request, vectors};

/// What becomes of the lines.
const EXPECTED: &str = "
  51 agrees
   9 agrees that there is no result
 351 agrees, refused by validation
 120 left out a set: a sidecar replaces a container of the Pod, and there are other sets
  10 left out a set: it cannot be injected
   6 left out a set: it has no result
  87 left out a set: it is MergePatchJson, and policies cannot parse JSON
  22 left out a set: it is empty, and the API server refuses containers without image
   1 left out a set: it is invalid
 500 lines
 225 lines with 1 sets
 130 lines with 2 sets
  56 lines with 3 sets
   5 skipped: a subresource, which nothing is injected through
  25 skipped: an update, which injects nothing
  40 skipped: no set has a policy
  19 skipped: the Namespace does not exist
";

/// The lines that policies can do, without those of their sets that they cannot, and the policies.
fn cases(report: &mut Report) -> (Vec<Case>, Vec<Value>) {
    let (mut cases, mut objects) = (Vec::new(), Vec::new());
    for mut vector in vectors(report) {
        resolve_conflicts(&mut vector.input);
        let mut case = Case::new(&vector, Stored::with_policy);
        while let Some(why) = order_matters(&case) {
            report.count(format!("left out a set: {why}"));
            case.sets.pop();
        }
        // A set without a policy is left out, and with it what the others know of it.
        let compiled = loop {
            let views = case.views();
            let options = policy::Options {
                namespace: "kruise-system",
                sort_containers: case.gates.sort,
                sets: &views,
                revisions: &case.revisions,
            };
            let compiled: Vec<_> = views
                .iter()
                .map(|set| (set.name.to_owned(), compile(set, &options)))
                .collect();
            let unsupported = compiled
                .iter()
                .find_map(|(name, one)| Some((name.clone(), one.as_ref().err()?.clone())));
            let Some((name, why)) = unsupported else {
                break compiled
                    .into_iter()
                    .flat_map(|(_, one)| one.unwrap())
                    .collect::<Vec<_>>();
            };
            report.count(format!(
                "left out a set: it {}",
                why.why.split(':').next().unwrap()
            ));
            case.sets.retain(|set| set.name != name);
        };
        if case.sets.is_empty() {
            report.count("skipped: no set has a policy");
            continue;
        }
        for mut object in compiled {
            let name = format!(
                "line{}.{}",
                case.line,
                object["metadata"]["name"].as_str().unwrap()
            );
            if object["kind"] == "MutatingAdmissionPolicy" {
                let selector = ["spec", "matchConstraints", "objectSelector", "matchLabels", LINE];
                set(&mut object, &selector, json!(case.line.to_string()));
            } else {
                set(&mut object, &["spec", "policyName"], json!(name));
            }
            set(&mut object, &["metadata", "name"], json!(name));
            objects.push(object);
        }
        report.count(format!("lines with {} sets", case.sets.len()));
        cases.push(case);
    }
    (cases, objects)
}

/// The parts of a Pod that are compared. `ordered` keeps the order of volumes and pull secrets.
fn parts(pod: &Value, ordered: bool) -> BTreeMap<&'static str, Value> {
    let mut parts = BTreeMap::new();
    for list in ["containers", "initContainers", "volumes", "imagePullSecrets"] {
        let mut part = pod["spec"][list].clone();
        if let Value::Array(items) = &mut part {
            items.iter_mut().for_each(quantities);
            if list == "imagePullSecrets" {
                // Policies leave the Pod's own list as it is, with its duplicates.
                let mut names = BTreeSet::new();
                items.retain(|item| names.insert(item["name"].as_str().unwrap_or_default().to_owned()));
            }
            if !ordered && !list.to_ascii_lowercase().ends_with("containers") {
                items.sort_by_key(|item| item["name"].as_str().unwrap().to_owned());
            }
        }
        parts.insert(list, part);
    }
    let mut annotations = pod["metadata"]["annotations"].clone();
    for (_, text) in annotations.as_object_mut().into_iter().flatten() {
        let time = r#""updateTimestamp":"1970-01-01T00:00:00Z""#;
        *text = text
            .as_str()
            .unwrap()
            .replace(time, r#""updateTimestamp":null"#)
            .into();
    }
    parts.insert("annotations", annotations);
    parts
}

/// Writes amounts of resources in one notation.
fn quantities(container: &mut Value) {
    for list in ["limits", "requests"] {
        let amounts = container["resources"]
            .get_mut(list)
            .and_then(Value::as_object_mut);
        for (_, amount) in amounts.into_iter().flatten() {
            *amount = Quantity::from_json(amount).unwrap().milli().to_string().into();
        }
    }
}

/// Names of containers in the Pod: (whether they are init containers, name).
type Names = BTreeSet<(bool, String)>;

fn names_of_pod(pod: &Value) -> Names {
    let lists = [("containers", false), ("initContainers", true)];
    let names = lists.into_iter().flat_map(|(list, is_init)| {
        let items = pod["spec"][list].as_array().into_iter().flatten();
        items.map(move |item| (is_init, item["name"].as_str().unwrap().to_owned()))
    });
    names.collect()
}

/// Names of a set's containers, in all revisions.
fn names_of_set(set: &Stored, revisions: &[Arc<ControllerRevision>]) -> Names {
    let lists = [("containers", false), ("initContainers", true)];
    let current = serde_json::to_value(&set.spec).unwrap();
    let older = revisions
        .iter()
        .filter(|revision| revision.metadata.name.as_ref().unwrap().split('-').next() == Some(&set.name))
        .filter_map(|revision| Some(revision.data.as_ref()?.0["spec"].clone()));
    let names = std::iter::once(current).chain(older).flat_map(|spec| {
        lists.into_iter().flat_map(move |(list, is_init)| {
            let items = spec[list].as_array().cloned().unwrap_or_default();
            items.into_iter().flat_map(move |item| {
                let name = item["name"].as_str().unwrap();
                let hot = item["upgradeStrategy"]["upgradeType"] == "HotUpgrade"
                    && (!is_init || item["restartPolicy"] == "Always");
                if hot {
                    vec![(is_init, format!("{name}-1")), (is_init, format!("{name}-2"))]
                } else {
                    vec![(is_init, name.to_owned())]
                }
            })
        })
    });
    names.collect()
}

/// Makes sets such that validation would not refuse them beside each other: volumes of the same name are equal, and no two
/// sets have a container of the same name.
fn resolve_conflicts(input: &mut Value) {
    let first = input["sidecarSets"][0]["metadata"]["name"].clone();
    let mut known: BTreeMap<String, Value> = BTreeMap::new();
    for (list, spec) in [("sidecarSets", "/spec"), ("controllerRevisions", "/data/spec")] {
        for object in input[list].as_array_mut().into_iter().flatten() {
            let name = object["metadata"]["name"].as_str().unwrap();
            let set = name.split('-').next().unwrap().to_owned();
            let Some(spec) = object.pointer_mut(spec) else {
                continue;
            };
            for volume in spec["volumes"].as_array_mut().into_iter().flatten() {
                let name = volume["name"].as_str().unwrap().to_owned();
                *volume = known.entry(name).or_insert_with(|| volume.clone()).clone();
            }
            if first == *set {
                continue;
            }
            for list in ["containers", "initContainers"] {
                for container in spec[list].as_array_mut().into_iter().flatten() {
                    let name = format!("{}-{set}", container["name"].as_str().unwrap());
                    container["name"] = json!(name);
                }
            }
        }
    }
}

/// Why the order of policies matters for a Pod.
fn order_matters(case: &Case) -> Option<&'static str> {
    let of_sets: Vec<Names> = case
        .sets
        .iter()
        .map(|set| names_of_set(set, &case.revisions))
        .collect();
    let of_pod = names_of_pod(&case.pod);
    let mut seen = BTreeSet::new();
    if !of_sets.iter().flatten().all(|name| seen.insert(name.clone())) {
        return Some("two sets have a container of the same name, which validation refuses");
    }
    (case.sets.len() > 1 && !seen.is_disjoint(&of_pod))
        .then_some("a sidecar replaces a container of the Pod, and there are other sets")
}

async fn compare(cluster: &InjectionCluster, case: &Case) -> Outcome {
    // Without the status, which the API server does not store: policies inject whatever it says.
    let stored = request(&cluster.mutate(&request(&case.pod)).await.unwrap());
    let mut input = stored.clone();
    for key in [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE] {
        let annotations = input["metadata"]["annotations"].as_object_mut();
        if let Some(annotations) = annotations
            && annotations
                .get(key)
                .is_some_and(|text| parse_with_format(text.as_str().unwrap()).1 == HashFormat::Invalid)
        {
            // Policies replace the annotation instead.
            annotations.remove(key);
        }
    }
    let mut labelled = request(&case.pod);
    set(
        &mut labelled,
        &["metadata", "labels", LINE],
        json!(case.line.to_string()),
    );
    let mut expected = match case.inject(&input, 50) {
        Ok(pod) => request(&pod),
        Err(why) => {
            return match cluster.mutate(&labelled).await {
                Err(refused) if refused.contains("denied request: expression") => {
                    Ok("agrees that there is no result")
                }
                other => Err(format!("function {why}\npolicies {:?}", other.map(|_| ()))),
            };
        }
    };
    if expected["metadata"]["annotations"][keys::SIDECAR_SET_INJECTED_LIST]
        == stored["metadata"]["annotations"][keys::SIDECAR_SET_INJECTED_LIST]
    {
        // Nothing was injected.
        for key in [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE] {
            let text = &stored["metadata"]["annotations"][key];
            if !text.is_null() {
                set(&mut expected, &["metadata", "annotations", key], text.clone());
            }
        }
    }
    let (expected_pod, actual_pod) = match (cluster.mutate(&expected).await, cluster.mutate(&labelled).await)
    {
        (Ok(expected), Ok(actual)) => (expected, actual),
        (expected, actual) => {
            let why = format!("{:?}\n{:?}", expected.map(|_| ()), actual.map(|_| ()));
            return Err(why);
        }
    };
    let ordered = case.sets.len() == 1;
    let (expected_parts, actual_parts) = (parts(&expected_pod, ordered), parts(&actual_pod, ordered));
    let mut differences = Vec::new();
    for (part, expected) in &expected_parts {
        if expected != &actual_parts[part] {
            differences.push(format!(
                "{part}\n  function {expected}\n  policies {}",
                actual_parts[part]
            ));
        }
    }
    let (expected, actual) = (
        cluster.create_pod(&expected).await,
        cluster.create_pod(&labelled).await,
    );
    if expected.is_ok() != actual.is_ok() {
        differences.push(format!(
            "{:?}\n{:?}",
            expected.map(|_| ()),
            actual.as_ref().map(|_| ())
        ));
    }
    if differences.is_empty() {
        Ok(match actual {
            Ok(_) => "agrees",
            Err(_) => "agrees, refused by validation",
        })
    } else {
        Err(differences.join("\n"))
    }
}

#[tokio::test]
async fn injection_vectors_match_the_function_through_policies() {
    let Some(cluster) = InjectionCluster::start_with_policies().await else {
        return;
    };
    let mut report = Report::default();
    let (cases, objects) = cases(&mut report);
    let start = std::time::Instant::now();
    println!("{} objects", objects.len());
    cluster.install(objects).await;
    println!("installed after {:?}", start.elapsed());
    let outcomes: Vec<(usize, Outcome)> = stream::iter(&cases)
        .map(|case| async { (case.line, compare(&cluster, case).await) })
        .buffered(6)
        .collect()
        .await;
    println!("compared after {:?}", start.elapsed());
    for (line, outcome) in outcomes {
        report.add(line, outcome);
    }
    report.check(EXPECTED);
}
