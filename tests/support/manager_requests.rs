//! What the manager asked of the API server in a namespace, from the audit log.

use jiff::Timestamp;
use serde_json::Value;
use testbed::cluster::ControlPlane;

use super::pods::text;

/// The manager's account.
const USER: &str = "system:serviceaccount:kruise-system:kruise-manager";

/// Verb, resource with subresource and name, and the status code of the response.
pub type ManagerRequest = ((String, String, String), i64);

/// The manager's writes in a namespace, successful or not, without dry runs.
pub fn write_requests(plane: &ControlPlane, namespace: &str) -> Vec<ManagerRequest> {
    in_namespace(plane.audited_writes().unwrap(), namespace)
}

/// The manager's dry runs in a namespace.
pub fn dry_runs(plane: &ControlPlane, namespace: &str) -> Vec<ManagerRequest> {
    in_namespace(plane.dry_runs().unwrap(), namespace)
}

/// When the manager wrote an object of a namespace, successfully or not; `resource` may have a subresource.
pub fn write_times(plane: &ControlPlane, namespace: &str, resource: &str, name: &str) -> Vec<Timestamp> {
    let all = plane.audited_writes().unwrap();
    let of_object = all.iter().filter(|event| {
        let ((_, what, who), _) = parse(event);
        let in_namespace = event["objectRef"]["namespace"] == namespace;
        is_by_manager(event) && in_namespace && what == resource && who == name
    });
    let mut times: Vec<Timestamp> = of_object
        .map(|event| text(&event["requestReceivedTimestamp"]).parse().unwrap())
        .collect();
    times.sort();
    times
}

/// Whether the manager sent the request of this event.
pub fn is_by_manager(event: &Value) -> bool {
    event["user"]["username"] == USER
}

fn in_namespace(all: Vec<Value>, namespace: &str) -> Vec<ManagerRequest> {
    let by_manager = all
        .iter()
        .filter(|event| is_by_manager(event) && event["objectRef"]["namespace"] == namespace);
    by_manager.map(parse).collect()
}

/// What an event of the audit log is about.
pub fn parse(event: &Value) -> ManagerRequest {
    let (object, sub) = (&event["objectRef"], text(&event["objectRef"]["subresource"]));
    let slash = if sub.is_empty() { "" } else { "/" };
    let resource = format!("{}{slash}{sub}", text(&object["resource"]));
    let body = event["responseObject"]["metadata"]["name"].as_str();
    let name = object["name"].as_str().or(body).unwrap_or_default().to_owned();
    let code = event["responseStatus"]["code"].as_i64().unwrap_or_default();
    ((text(&event["verb"]), resource, name), code)
}
