//! What the webhook makes of a Pod is what the function makes of it, for the vectors of the Go implementation: through a
//! real API server and our program, which reads the sets and revisions of the vectors from there.

use std::cell::RefCell;

use jiff::Timestamp;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_workload::pod_admission::MutationError;
use kruise_workload::sidecarset::inject::InjectionError;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::manager::Manager;
use support::untyped::untyped;
use support::waits::poll_until;
use testbed::port;

use crate::cluster::InjectionCluster;
use crate::stored::Stored;
use crate::vectors::{Case, GATES, Gates, Outcome, Report, request, vectors};

/// What becomes of the lines.
const EXPECTED: &str = "
  22 agrees
  19 agrees that nothing is injected
  60 agrees that nothing is injected, refused by validation
   6 agrees that the Pod is refused
  58 agrees that there is no result
 286 agrees, refused by validation
 500 lines
 147 lines with 1 sets
 160 lines with 2 sets
 144 lines with 3 sets
 121 lines with sorted containers
  72 lines with the readiness gate for all Pods
   5 skipped: a subresource, which nothing is injected through
  25 skipped: an update, which injects nothing
  19 skipped: the Namespace does not exist
";
/// Name of the SidecarSet that shows which sets and revisions a program knows, and label of the Pod that it selects.
const MARKER: &str = "marker";
/// Name of the webhooks' configuration. The API server calls them in the order of these names: before the last one.
const CONFIGURATION: &str = "injection";

/// Names of the programs, and their gates.
const PROGRAMS: [(&str, Gates); 4] = [
    ("no-gate", gates(false, false)),
    ("sorted", gates(true, false)),
    ("readiness-gate", gates(false, true)),
    ("both-gates", gates(true, true)),
];

const fn gates(sort: bool, readiness: bool) -> Gates {
    Gates { sort, readiness }
}

/// Our webhooks, behind an API server.
struct Webhooks {
    /// One for each combination of gates.
    programs: Vec<Manager>,
    cluster: InjectionCluster,
    sets: Api<DynamicObject>,
    revisions: Api<DynamicObject>,
}

impl Webhooks {
    async fn start() -> Self {
        let cluster = InjectionCluster::start().await;
        let plane = &cluster.plane;
        let deploy = |path: &str| format!("{}/../deploy/{path}", env!("CARGO_MANIFEST_DIR"));
        plane
            .kubectl(&["apply", "-f", &deploy("default/namespaces.yaml")])
            .unwrap();
        for folder in ["crds", "rbac"] {
            plane.kubectl(&["apply", "-k", &deploy(folder)]).unwrap();
        }
        // It makes the certificates, and ends before there are sets that it would change.
        let mut controllers =
            Manager::with_role(plane, "kruise-manager", "controllers", port::reserve().unwrap());
        controllers.start().unwrap();
        controllers.stop().unwrap();
        let secret = [
            "get",
            "secret",
            "kruise-manager-webhook-certs",
            "--namespace=kruise-system",
        ];
        let ca_bundle = [&secret[..], &["--output=jsonpath={.data.ca\\.crt}"]].concat();
        let ca_bundle = plane.kubectl(&ca_bundle).unwrap();

        let mut webhooks = Vec::new();
        let programs = PROGRAMS.map(|(name, gates)| {
            let port = port::reserve().unwrap();
            let mut program = Manager::webhooks_with_gates(plane, name, port, &gates.flag());
            program.start().unwrap();
            let url = format!("https://127.0.0.1:{port}{}", keys::MUTATE_POD_PATH);
            let rule = json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] });
            webhooks.push(json!({
                "name": format!("{name}.example.com"),
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "clientConfig": { "url": url, "caBundle": ca_bundle },
                "objectSelector": { "matchLabels": { GATES: gates.label() } },
                "rules": [rule],
            }));
            program
        });
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": CONFIGURATION },
            "webhooks": webhooks,
        });
        plane.apply(&configuration.to_string()).unwrap();
        let client = &cluster.cluster;
        Self {
            sets: untyped(client, "apps.kruise.io", "v1beta1", "SidecarSet", None),
            revisions: untyped(
                client,
                "apps",
                "v1",
                "ControllerRevision",
                Some(keys::SYSTEM_NAMESPACE),
            ),
            programs: programs.into(),
            cluster,
        }
    }

    /// Replaces all sets and revisions by those of a line, and waits until the line's program knows them.
    async fn store(&self, case: &mut Case, input: &Value) {
        for api in [&self.sets, &self.revisions] {
            api.delete_collection(&DeleteParams::default(), &ListParams::default())
                .await
                .unwrap();
        }
        for (stored, object) in case.sets.iter_mut().zip(input["sidecarSets"].as_array().unwrap()) {
            stored.resource_version = self.create_set(object).await;
        }
        for object in input["controllerRevisions"].as_array().into_iter().flatten() {
            self.create_revision(object).await;
        }
        // Both watches are in the order of the writes: a program that knows these two knows all before them.
        let name = format!("{MARKER}-{}", case.line);
        let metadata = json!({ "name": name, "labels": { keys::SIDECAR_SET_NAME: MARKER } });
        let container = |image: &str| json!([{ "name": MARKER, "image": image }]);
        let data = json!({ "spec": { "containers": container(&name) } });
        self.create_revision(&json!({ "metadata": metadata, "revision": 1, "data": data }))
            .await;
        self.create_set(&json!({
            "apiVersion": "apps.kruise.io/v1beta1",
            "kind": "SidecarSet",
            "metadata": { "name": MARKER },
            "spec": {
                "selector": { "matchLabels": { MARKER: "yes" } },
                "containers": container("current"),
                "injectionStrategy": { "revision": { "revisionName": name, "policy": "Always" } },
            },
        }))
        .await;
        self.wait_for_marker(case.gates, &name).await;
    }

    /// Stores a set and its status; returns its version.
    async fn create_set(&self, object: &Value) -> String {
        let name = object["metadata"]["name"].as_str().unwrap();
        let typed: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        let mut stored = self.sets.create(&PostParams::default(), &typed).await.unwrap();
        if !object["status"].is_null() {
            let status = Patch::Merge(json!({ "status": object["status"] }));
            let params = PatchParams::default();
            stored = self.sets.patch_status(name, &params, &status).await.unwrap();
        }
        stored.metadata.resource_version.unwrap()
    }

    async fn create_revision(&self, object: &Value) {
        let mut object = object.clone();
        set(&mut object, &["apiVersion"], json!("apps/v1"));
        set(&mut object, &["kind"], json!("ControllerRevision"));
        let typed: DynamicObject = serde_json::from_value(object).unwrap();
        self.revisions
            .create(&PostParams::default(), &typed)
            .await
            .unwrap();
    }

    async fn wait_for_marker(&self, gates: Gates, image: &str) {
        // The label `tier` keeps the Pod from sets of vectors that select what others have not.
        let labels = json!({ MARKER: "yes", "tier": "c", GATES: gates.label() });
        let container = json!({ "name": "a", "image": "i" });
        let pod =
            json!({ "metadata": { "name": "p", "labels": labels }, "spec": { "containers": [container] } });
        let last = RefCell::new(String::new());
        let injected = async || {
            let answer = self.cluster.create_pod(&pod).await;
            last.replace(format!("{answer:?}"));
            let pod = answer.ok()?;
            let mut containers = pod["spec"]["containers"].as_array()?.iter();
            containers.find(|one| one["image"] == image).map(drop)
        };
        let tails = || self.programs.iter().map(|program| program.tail());
        let logs = || format!("{}\n{}", last.borrow(), tails().collect::<Vec<_>>().join("\n"));
        poll_until(image, &logs, injected).await;
    }

    /// Compares the answer with the function's result.
    async fn compare(&self, case: &Case) -> Outcome {
        let sent = with_status(&case.pod);
        // The program ignores the status, as the API server does.
        let stored = request(&self.cluster.mutate(&sent).await.unwrap());
        let mut labelled = sent;
        set(
            &mut labelled,
            &["metadata", "labels", GATES],
            json!(case.gates.label()),
        );
        let start = Timestamp::from_second(Timestamp::now().as_second()).unwrap();
        let actual = self.cluster.mutate(&labelled).await;
        let expected = case.mutate(&stored, 0);
        assert_eq!(
            expected,
            case.mutate(&stored, 99),
            "percentages of the vectors are 0% and 100%"
        );
        let expected = match (expected, &actual) {
            (Ok(pod), _) => pod,
            (Err(why), Err(refused)) if says(refused, &why) => {
                return Ok(match why {
                    MutationError::Injection(InjectionError::InvalidAnnotation { .. }) => {
                        "agrees that the Pod is refused"
                    }
                    _ => "agrees that there is no result",
                });
            }
            (Err(why), actual) => {
                return Err(format!("function {why}\nwebhook {:?}", actual.as_ref().map(drop)));
            }
        };
        let nothing = expected == stored;
        let (expected_pod, actual_pod) = match (self.cluster.mutate(&expected).await, actual) {
            (Ok(expected), Ok(actual)) => (expected, actual),
            (expected, actual) => {
                return Err(format!(
                    "function {:?}\nwebhook {:?}",
                    expected.map(drop),
                    actual.map(drop)
                ));
            }
        };
        let actual_pod = without_times(request(&actual_pod), start);
        let difference = json_patch::diff(&request(&expected_pod), &actual_pod);
        if !difference.is_empty() {
            return Err(format!("from the function's to the webhook's: {difference}"));
        }
        let expected = self.cluster.create_pod(&expected).await;
        let actual = self.cluster.create_pod(&labelled).await;
        match (nothing, expected, actual) {
            (true, Ok(_), Ok(_)) => Ok("agrees that nothing is injected"),
            (true, Err(_), Err(_)) => Ok("agrees that nothing is injected, refused by validation"),
            (false, Ok(_), Ok(_)) => Ok("agrees"),
            (false, Err(_), Err(_)) => Ok("agrees, refused by validation"),
            (_, expected, actual) => Err(format!(
                "function {:?}\nwebhook {:?}",
                expected.map(drop),
                actual.map(drop)
            )),
        }
    }
}

/// What a client would send, with a status: the API server does not store it, but webhooks get it.
fn with_status(pod: &Value) -> Value {
    let mut sent = request(pod);
    if let Some(phase) = pod["status"].get("phase") {
        set(&mut sent, &["status", "phase"], phase.clone());
    }
    sent
}

/// Whether the API server's refusal has the function's reason.
fn says(refused: &str, why: &MutationError) -> bool {
    let why = why.to_string();
    match refused.split_once("denied the request: ") {
        Some((_, message)) => message == why,
        // It quotes what a failed webhook answers.
        None => refused.contains(&format!("an error on the server ({why:?})")),
    }
}

/// The Pod with the function's time where the program recorded one since `start`.
fn without_times(mut pod: Value, start: Timestamp) -> Value {
    for key in [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE] {
        let Some(mut text) = pod["metadata"]["annotations"][key].as_str().map(str::to_owned) else {
            continue;
        };
        let records: Value = serde_json::from_str(&text).unwrap_or_default();
        let field = |time: &str| format!(r#""updateTimestamp":"{time}""#);
        for record in records
            .as_object()
            .into_iter()
            .flat_map(|records| records.values())
        {
            let time = record["updateTimestamp"].as_str().unwrap_or_default();
            if time.parse().is_ok_and(|time: Timestamp| time >= start) {
                text = text.replace(&field(time), &field("1970-01-01T00:00:00Z"));
            }
        }
        set(&mut pod, &["metadata", "annotations", key], json!(text));
    }
    pod
}

#[tokio::test]
async fn injection_vectors_match_the_function_through_webhook() {
    let webhooks = Webhooks::start().await;
    let mut report = Report::default();
    let start = std::time::Instant::now();
    for vector in vectors(&mut report) {
        let mut case = Case::new(&vector, Stored::from_json);
        report.count(format!("lines with {} sets", case.sets.len()));
        if case.gates.sort {
            report.count("lines with sorted containers");
        }
        if case.gates.readiness {
            report.count("lines with the readiness gate for all Pods");
        }
        webhooks.store(&mut case, &vector.input).await;
        report.add(case.line, webhooks.compare(&case).await);
    }
    println!("compared after {:?}", start.elapsed());
    report.check(EXPECTED);
}
