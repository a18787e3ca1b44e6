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

const VECTORS: &str = include_str!("../data/go/sidecarset-injection.jsonl");
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
    fn inject(&self, pod: &Value, left_out: &BTreeSet<String>) -> Result<Value, InjectionError> {
        let mut pod = pod.clone();
        let mut sets = self.views();
        sets.retain(|set| !left_out.contains(set.name));
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
        let mut case = Case {
            line: at + 1,
            namespace_labels: string_map(&known["labels"]),
            pod,
            sets: input["sidecarSets"].as_array().unwrap().iter().map(Stored::from_json).collect(),
            revisions: revisions(&input["controllerRevisions"]),
            sort: input["sortByNameGate"] == true,
        };
        // A set without a policy is left out, and with it what the others know of it.
        let compiled = loop {
            let views = case.views();
            let options = policy::Options {
                namespace: "kruise-system",
                sort_containers: case.sort,
                sets: &views,
                revisions: &case.revisions,
            };
            let compiled: Vec<_> = views.iter().map(|set| (set.name.to_owned(), compile(set, &options))).collect();
            let unsupported = compiled.iter().find_map(|(name, one)| Some((name.clone(), one.as_ref().err()?.clone())));
            let Some((name, why)) = unsupported else {
                break compiled.into_iter().flat_map(|(_, one)| one.unwrap()).collect::<Vec<_>>();
            };
            report.count(format!("unsupported set: {}", why.why.split(':').next().unwrap()));
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
        cases.push(case);
    }
    (cases, objects)
}

/// What a client would send to create this Pod.
fn request(pod: &Value) -> Value {
    let mut request = json!({ "metadata": {}, "spec": pod["spec"] });
    for field in ["name", "namespace", "labels", "annotations"] {
        if !pod["metadata"][field].is_null() {
            set(&mut request, &["metadata", field], pod["metadata"][field].clone());
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
            if !ordered && !list.ends_with("ontainers") {
                items.sort_by_key(|item| item["name"].as_str().unwrap().to_owned());
            }
        }
        parts.insert(list, part);
    }
    let mut annotations = pod["metadata"]["annotations"].clone();
    for (_, text) in annotations.as_object_mut().into_iter().flatten() {
        let time = r#""updateTimestamp":"1970-01-01T00:00:00Z""#;
        *text = text.as_str().unwrap().replace(time, r#""updateTimestamp":null"#).into();
    }
    parts.insert("annotations", annotations);
    parts
}

/// Writes amounts of resources in one notation.
fn quantities(container: &mut Value) {
    for list in ["limits", "requests"] {
        let amounts = container["resources"].get_mut(list).and_then(Value::as_object_mut);
        for (_, amount) in amounts.into_iter().flatten() {
            *amount = Quantity::from_json(amount).unwrap().milli().to_string().into();
        }
    }
}

/// Whether a set replaces a container of the Pod while others apply: the order of policies matters.
fn replaces_among_others(case: &Case, pod: &Value) -> bool {
    let names = |list: &str| -> BTreeSet<String> {
        let items = pod["spec"][list].as_array().into_iter().flatten();
        items.map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    let (main, init) = (names("containers"), names("initContainers"));
    let replaces = |set: &Stored| {
        let view = set.view();
        let is_init = |name: &str| {
            init.contains(name) || init.contains(name.trim_end_matches("-1").trim_end_matches("-2"))
        };
        let inits = set.spec.init_containers.iter().flatten();
        let inits = inits.flat_map(|one| {
            let name = one.container["name"].as_str().unwrap();
            [name.to_owned(), format!("{name}-1"), format!("{name}-2")]
        });
        view.names_in_pod().iter().any(|name| main.contains(name)) || inits.into_iter().any(|name| is_init(&name))
    };
    case.sets.len() > 1 && case.sets.iter().any(replaces)
}

enum Outcome {
    Agrees,
    RefusedByBoth,
    Skipped(String),
    Differs(String),
}

async fn compare(cluster: &PolicyCluster, case: &Case) -> Outcome {
    let stored = match cluster.create_pod(&request(&case.pod)).await {
        Ok(stored) => request(&stored),
        Err(why) => {
            let why = why.split("is invalid: ").last().unwrap().split(": ").nth(1).unwrap_or(&why).to_owned();
            return Outcome::Skipped(format!("the Pod is refused as it is: {why}"));
        }
    };
    if replaces_among_others(case, &stored) {
        return Outcome::Skipped("a sidecar replaces a container, and there are other sets".to_owned());
    }
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
    let mut left_out = BTreeSet::new();
    let expected = loop {
        match case.inject(&input, &left_out) {
            Ok(pod) => break pod,
            // Policies leave out a set without resources.
            Err(InjectionError::Resources { set, .. }) => left_out.insert(set),
            Err(why) => return Outcome::Differs(format!("the function fails: {why}")),
        };
    };
    let expected = cluster.create_pod(&request(&expected)).await;
    let mut labelled = request(&case.pod);
    set(&mut labelled, &["metadata", "labels", LINE], json!(case.line.to_string()));
    let actual = cluster.create_pod(&labelled).await;
    match (expected, actual) {
        (Err(_), Err(_)) => Outcome::RefusedByBoth,
        (Ok(expected), Ok(actual)) => {
            let ordered = case.sets.len() == 1;
            let (expected, actual) = (parts(&expected, ordered), parts(&actual, ordered));
            let mut differences = Vec::new();
            for (part, expected) in &expected {
                if expected != &actual[part] {
                    differences.push(format!("{part}\n  function {expected}\n  policies {}", actual[part]));
                }
            }
            if differences.is_empty() {
                Outcome::Agrees
            } else {
                Outcome::Differs(differences.join("\n"))
            }
        }
        (expected, actual) => Outcome::Differs(format!(
            "function {:?}\npolicies {:?}",
            expected.map(|_| ()),
            actual.map(|_| ())
        )),
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
            Outcome::Agrees => report.count("agrees"),
            Outcome::RefusedByBoth => report.count("refused by both"),
            Outcome::Skipped(why) => report.count(format!("skipped: {why}")),
            Outcome::Differs(why) => {
                report.count("differs");
                report.differences.push(format!("line {line}: {why}"));
            }
        }
    }
    for (what, count) in &report.counts {
        println!("{count:4} {what}");
    }
    assert!(report.differences.is_empty(), "{}", report.differences.join("\n"));
}
