//! What policies make of a Pod is what the function makes of it, for the vectors of the Go implementation.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::string_map;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_workload::sidecarset::inject::{self, InjectionError};
use kruise_workload::sidecarset::policy::{self, compile};
use kruise_workload::sidecarset::recorded::{HashFormat, parse_with_format};
use kruise_workload::sidecarset::resources::Quantity;
use kruise_workload::sidecarset::set::SetView;
use serde_json::{Value, json};

use crate::cluster::{PolicyCluster, Stored, revisions};
use crate::last_webhook;

const VECTORS: &str = include_str!("../data/go/sidecarset-injection.jsonl");
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
 470 lines
 225 lines with 1 sets
 130 lines with 2 sets
  56 lines with 3 sets
  40 skipped: no set has a policy
  19 skipped: the Namespace does not exist
";
/// Label of Pods with the number of their line, which policies select.
const LINE: &str = "line";

/// A line with what can be done by policies.
struct Case {
    line: usize,
    pod: Value,
    sets: Vec<Stored>,
    revisions: Vec<ControllerRevision>,
    namespace_labels: BTreeMap<String, String>,
    sort: bool,
}

impl Case {
    fn views(&self) -> Vec<SetView<'_>> {
        self.sets.iter().map(Stored::view).collect()
    }

    fn namespace(&self) -> &str {
        self.pod["metadata"]["namespace"].as_str().unwrap_or("default")
    }

    /// What the function makes of a Pod.
    fn inject(&self, pod: &Value) -> Result<Value, InjectionError> {
        let mut pod = pod.clone();
        let sets = self.views();
        let cluster = inject::Cluster {
            sets: &sets,
            namespace_labels: Some(&self.namespace_labels),
            revisions: &self.revisions,
        };
        let options = inject::Options {
            sort_containers: self.sort,
            now: Timestamp::UNIX_EPOCH,
        };
        inject::inject(&mut pod, self.namespace(), &cluster, &options, &mut || 50)?;
        Ok(pod)
    }
}

#[derive(Default)]
struct Report {
    counts: BTreeMap<String, usize>,
    differences: Vec<String>,
}

impl Report {
    fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }
}

/// The lines that policies can do, without those of their sets that they cannot, and the policies.
fn cases(report: &mut Report) -> (Vec<Case>, Vec<Value>) {
    let (mut cases, mut objects) = (Vec::new(), Vec::new());
    for (at, line) in VECTORS.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let input = &vector["in"];
        if input["operation"] != "CREATE" || input["subResource"] != "" {
            continue;
        }
        report.count("lines");
        let pod = input["pod"].clone();
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default");
        let known = input["namespaces"].as_array().unwrap();
        let Some(known) = known.iter().find(|one| one["name"] == *namespace) else {
            report.count("skipped: the Namespace does not exist");
            continue;
        };
        let mut input = input.clone();
        resolve_conflicts(&mut input);
        let mut case = Case {
            line: at + 1,
            namespace_labels: string_map(&known["labels"]),
            pod,
            sets: input["sidecarSets"]
                .as_array()
                .unwrap()
                .iter()
                .map(Stored::from_json)
                .collect(),
            revisions: revisions(&input["controllerRevisions"]),
            sort: input["sortByNameGate"] == true,
        };
        while let Some(why) = order_matters(&case) {
            report.count(format!("left out a set: {why}"));
            case.sets.pop();
        }
        // A set without a policy is left out, and with it what the others know of it.
        let compiled = loop {
            let views = case.views();
            let options = policy::Options {
                namespace: "kruise-system",
                sort_containers: case.sort,
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
            let name = format!("line{}.{}", at + 1, object["metadata"]["name"].as_str().unwrap());
            if object["kind"] == "MutatingAdmissionPolicy" {
                let selector = ["spec", "matchConstraints", "objectSelector", "matchLabels", LINE];
                set(&mut object, &selector, json!((at + 1).to_string()));
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

/// What a client would send to create this Pod.
fn request(pod: &Value) -> Value {
    let mut request = json!({ "metadata": {}, "spec": pod["spec"] });
    for field in ["name", "namespace", "labels", "annotations"] {
        let mut value = pod["metadata"][field].clone();
        if let Some(labels) = value.as_object_mut() {
            labels.remove(last_webhook::LABEL);
        }
        if !pod["metadata"][field].is_null() {
            set(&mut request, &["metadata", field], value);
        }
    }
    request
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
fn names_of_set(set: &Stored, revisions: &[ControllerRevision]) -> Names {
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

enum Outcome {
    Agrees {
        created: bool,
    },
    /// The function has no result, and the policies, which have failure policy `Fail`, have none either.
    Fails,
    Skipped(String),
    Differs(String),
}

async fn compare(cluster: &PolicyCluster, case: &Case) -> Outcome {
    let stored = match cluster.mutate(&request(&case.pod)).await {
        Ok(stored) => request(&stored),
        Err(why) => return Outcome::Skipped(format!("the Pod cannot be read: {why}")),
    };
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
    let mut expected = match case.inject(&input) {
        Ok(pod) => request(&pod),
        Err(why) => {
            return match cluster.mutate(&labelled).await {
                Err(refused) if refused.contains("denied request: expression") => Outcome::Fails,
                other => Outcome::Differs(format!("function {why}\npolicies {:?}", other.map(|_| ()))),
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
            return Outcome::Differs(why);
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
        Outcome::Agrees {
            created: actual.is_ok(),
        }
    } else {
        Outcome::Differs(differences.join("\n"))
    }
}

#[tokio::test]
async fn policies_make_the_same_pods_as_the_function() {
    let mut report = Report::default();
    let (cases, objects) = cases(&mut report);
    let cluster = PolicyCluster::start().await;
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
        match outcome {
            Outcome::Agrees { created: true } => report.count("agrees"),
            Outcome::Agrees { created: false } => report.count("agrees, refused by validation"),
            Outcome::Fails => report.count("agrees that there is no result"),
            Outcome::Skipped(why) => report.count(format!("skipped: {why}")),
            Outcome::Differs(why) => {
                report.count("differs");
                report.differences.push(format!("line {line}: {why}"));
            }
        }
    }
    let counts: Vec<String> = report
        .counts
        .iter()
        .map(|(what, count)| format!("{count:4} {what}"))
        .collect();
    println!("{}", counts.join("\n"));
    assert!(report.differences.is_empty(), "{}", report.differences.join("\n"));
    assert_eq!(counts.join("\n"), EXPECTED.trim_matches('\n'));
}
