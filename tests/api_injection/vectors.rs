//! The vectors of the Go implementation, what the function makes of them, and what becomes of them in a test.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::string_map;
use kruise_api::json::set;
use kruise_workload::pod_admission::{self, MutationError, acceptable};
use kruise_workload::sidecarset::inject::{self, InjectionError};
use kruise_workload::sidecarset::set::SetView;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::last_webhook;
use crate::stored::Stored;

const VECTORS: &str = include_str!("../data/go/sidecarset-injection.jsonl");
/// Label of Pods with the number of their line, which policies select.
pub const LINE: &str = "line";
/// Label of Pods with the feature gates of the program whose webhook gets them.
pub const GATES: &str = "gates";

/// The input of a line.
pub struct Vector {
    /// Number of the line, from 1.
    pub line: usize,
    pub input: Value,
}

/// The lines that create a Pod.
pub fn vectors(report: &mut Report) -> Vec<Vector> {
    let mut vectors = Vec::new();
    for (at, text) in VECTORS.lines().enumerate() {
        report.count("lines");
        let mut vector: Value = serde_json::from_str(text).unwrap();
        let input = vector["in"].take();
        if input["operation"] != "CREATE" {
            report.count("skipped: an update, which injects nothing");
        } else if input["subResource"] != "" {
            report.count("skipped: a subresource, which nothing is injected through");
        } else if namespace_labels(&input).is_none() {
            report.count("skipped: the Namespace does not exist");
        } else {
            vectors.push(Vector { line: at + 1, input });
        }
    }
    vectors
}

fn namespace(pod: &Value) -> &str {
    pod["metadata"]["namespace"].as_str().unwrap_or("default")
}

/// Labels of the Pod's Namespace, if it exists.
fn namespace_labels(input: &Value) -> Option<BTreeMap<String, String>> {
    let mut known = input["namespaces"].as_array().unwrap().iter();
    let found = known.find(|one| one["name"] == namespace(&input["pod"]))?;
    Some(string_map(&found["labels"]))
}

/// Feature gates that change the result.
#[derive(Clone, Copy, PartialEq)]
pub struct Gates {
    /// `EnableSortSidecarContainerByName`.
    pub sort: bool,
    /// `KruisePodReadinessGate`.
    pub readiness: bool,
}

impl Gates {
    /// Value of the label [`GATES`].
    pub fn label(self) -> String {
        format!("{}-{}", self.sort, self.readiness)
    }

    /// Value of the flag.
    pub fn flag(self) -> String {
        format!(
            "EnableSortSidecarContainerByName={},KruisePodReadinessGate={}",
            self.sort, self.readiness
        )
    }
}

/// A Pod, and what the cluster has for it.
pub struct Case {
    pub line: usize,
    pub pod: Value,
    pub sets: Vec<Stored>,
    pub revisions: Vec<Arc<ControllerRevision>>,
    pub gates: Gates,
    namespace_labels: BTreeMap<String, String>,
}

impl Case {
    /// The case of a line whose sets are read by `stored`.
    pub fn new(vector: &Vector, stored: impl Fn(&Value) -> Stored) -> Self {
        let input = &vector.input;
        let sets = input["sidecarSets"].as_array().unwrap().iter();
        let revisions: Option<Vec<ControllerRevision>> =
            Option::deserialize(&input["controllerRevisions"]).unwrap();
        Self {
            line: vector.line,
            pod: input["pod"].clone(),
            sets: sets.map(stored).collect(),
            revisions: revisions.into_iter().flatten().map(Arc::new).collect(),
            gates: Gates {
                sort: input["sortByNameGate"] == true,
                readiness: input["kruisePodReadinessGate"] == true,
            },
            namespace_labels: namespace_labels(input).unwrap(),
        }
    }

    pub fn views(&self) -> Vec<SetView<'_>> {
        self.sets.iter().map(Stored::view).collect()
    }

    fn cluster<'a>(&'a self, sets: &'a [SetView<'a>]) -> inject::Cluster<'a> {
        inject::Cluster {
            sets,
            namespace_labels: Some(&self.namespace_labels),
            revisions: &self.revisions,
        }
    }

    fn options(&self) -> inject::Options {
        inject::Options {
            sort_containers: self.gates.sort,
            now: Timestamp::UNIX_EPOCH,
        }
    }

    /// The Pod with the sets. `percent` is the random number.
    pub fn inject(&self, pod: &Value, percent: u32) -> Result<Value, InjectionError> {
        let mut pod = pod.clone();
        let sets = self.views();
        let cluster = self.cluster(&sets);
        inject::inject(
            &mut pod,
            namespace(&self.pod),
            &cluster,
            &self.options(),
            &mut || percent,
        )?;
        Ok(pod)
    }

    /// The Pod with all that the webhook changes.
    pub fn mutate(&self, submitted: &Value, percent: u32) -> Result<Value, MutationError> {
        let mut pod = submitted.clone();
        let sets = self.views();
        let options = pod_admission::Options {
            readiness_gate_for_all: self.gates.readiness,
            enhanced_liveness: false,
            probe_markers: &[],
            inject: self.options(),
            random_name: [0; 5],
            cluster: self.cluster(&sets),
        };
        let request = pod_admission::Request {
            namespace: namespace(&self.pod),
            subresource: "",
        };
        pod_admission::mutate(&mut pod, &request, &options, &mut || percent)?;
        acceptable::check(submitted, &pod)?;
        Ok(pod)
    }
}

/// What a client would send to create this Pod, without labels of these tests.
pub fn request(pod: &Value) -> Value {
    let mut request = json!({ "metadata": {}, "spec": pod["spec"] });
    for field in ["name", "namespace", "labels", "annotations", "ownerReferences"] {
        let mut value = pod["metadata"][field].clone();
        if let (Some(labels), "labels") = (value.as_object_mut(), field) {
            labels.retain(|key, _| ![last_webhook::LABEL, LINE, GATES].contains(&key.as_str()));
        }
        if !value.is_null() {
            set(&mut request, &["metadata", field], value);
        }
    }
    request
}

/// How the result of a line agrees with the function's, or how it differs.
pub type Outcome = Result<&'static str, String>;

/// How many lines there are of which kind.
#[derive(Default)]
pub struct Report {
    counts: BTreeMap<String, usize>,
    differences: Vec<String>,
}

impl Report {
    pub fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub fn add(&mut self, line: usize, outcome: Outcome) {
        match outcome {
            Ok(how) => self.count(how),
            Err(why) => {
                self.count("differs");
                self.differences.push(format!("line {line}: {why}"));
            }
        }
    }

    /// Requires that nothing differs, and that no line is counted otherwise than expected.
    #[track_caller]
    pub fn check(&self, expected: &str) {
        let counts: Vec<String> = self
            .counts
            .iter()
            .map(|(what, count)| format!("{count:4} {what}"))
            .collect();
        println!("{}", counts.join("\n"));
        assert!(self.differences.is_empty(), "{}", self.differences.join("\n"));
        assert_eq!(counts.join("\n"), expected.trim_matches('\n'));
    }
}
