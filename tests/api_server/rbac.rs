//! What the three service accounts may do, and above all what they may not.

use crate::world::world;

/// Verb, resource (with subresource or name), namespace ("" for the whole cluster).
type Access = (&'static str, &'static str, &'static str);

const DAEMON_MAY: &[Access] = &[
    ("watch", "nodeimages.apps.kruise.io", ""),
    ("watch", "containerrecreaterequests.apps.kruise.io", ""),
    ("watch", "pods", ""),
    ("patch", "nodeimages.apps.kruise.io/status", ""),
    (
        "patch",
        "containerrecreaterequests.apps.kruise.io/status",
        "default",
    ),
    ("patch", "pods/status", "default"),
    ("create", "events", "default"),
    ("get", "secrets", "kruise-daemon-config"),
];

const DAEMON_MAY_NOT: &[Access] = &[
    ("list", "secrets", "kruise-daemon-config"),
    ("watch", "secrets", "kruise-daemon-config"),
    ("get", "secrets", "default"),
    ("get", "secrets", "kruise-system"),
    ("patch", "nodeimages.apps.kruise.io", ""),
    ("create", "nodeimages.apps.kruise.io", ""),
    ("patch", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "containerrecreaterequests.apps.kruise.io", "default"),
    ("delete", "containerrecreaterequests.apps.kruise.io", "default"),
    ("patch", "pods", "default"),
    ("update", "pods/status", "default"),
    ("patch", "pods/resize", "default"),
    ("create", "pods/exec", "default"),
    ("delete", "pods", "default"),
    ("list", "nodes", ""),
    ("get", "nodeimages.apps.kruise.io/status", ""),
];

const MANAGER_MAY: &[Access] = &[
    ("watch", "nodes", ""),
    ("watch", "pods", ""),
    ("patch", "pods/status", "default"),
    ("create", "nodeimages.apps.kruise.io", ""),
    ("patch", "nodeimages.apps.kruise.io", ""),
    ("patch", "nodeimages.apps.kruise.io/status", ""),
    ("delete", "nodeimages.apps.kruise.io", ""),
    ("patch", "imagepulljobs.apps.kruise.io", "default"),
    ("patch", "imagepulljobs.apps.kruise.io/status", "default"),
    ("delete", "imagepulljobs.apps.kruise.io", "default"),
    ("patch", "containerrecreaterequests.apps.kruise.io", "default"),
    (
        "patch",
        "containerrecreaterequests.apps.kruise.io/status",
        "default",
    ),
    ("delete", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "events", "default"),
    ("get", "secrets", "default"),
    ("watch", "secrets", ""),
    ("create", "secrets", "kruise-daemon-config"),
    ("delete", "secrets", "kruise-daemon-config"),
    ("create", "leases.coordination.k8s.io", "kruise-system"),
    (
        "update",
        "leases.coordination.k8s.io/kruise-manager",
        "kruise-system",
    ),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/nodeimages.apps.kruise.io",
        "",
    ),
    ("create", "pods", "default"),
    ("patch", "pods", "default"),
    ("delete", "pods", "default"),
    ("patch", "clonesets.apps.kruise.io/status", "default"),
    ("create", "persistentvolumeclaims", "default"),
    ("create", "controllerrevisions.apps", "default"),
    ("create", "imagepulljobs.apps.kruise.io", "default"),
    ("get", "imagepulljobs.apps.kruise.io", "default"),
    ("watch", "containerrecreaterequests.apps.kruise.io", ""),
    ("get", "containerrecreaterequests.apps.kruise.io", "default"),
    (
        "get",
        "customresourcedefinitions.apiextensions.k8s.io/imagepulljobs.apps.kruise.io",
        "",
    ),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
];

const MANAGER_MAY_NOT: &[Access] = &[
    ("get", "namespaces", ""),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/imagepulljobs.apps.kruise.io",
        "",
    ),
    (
        "get",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
    ("update", "imagepulljobs.apps.kruise.io", "default"),
    ("update", "pods/status", "default"),
    ("create", "containerrecreaterequests.apps.kruise.io", "default"),
    ("create", "secrets", "default"),
    ("update", "secrets", "default"),
    ("delete", "secrets", "default"),
    ("update", "secrets", "kruise-system"),
    ("update", "pods", "default"),
    ("deletecollection", "pods", "default"),
    ("create", "pods/exec", "default"),
    ("delete", "clonesets.apps.kruise.io", "default"),
    ("patch", "nodes", ""),
    ("update", "leases.coordination.k8s.io/other", "kruise-system"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io", ""),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "",
    ),
    (
        "create",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "",
    ),
    ("escalate", "clusterroles.rbac.authorization.k8s.io", ""),
];

const WEBHOOK_MAY: &[Access] = &[
    ("get", "pods", "default"),
    ("list", "pods", "default"),
    ("list", "persistentvolumeclaims", "default"),
    ("get", "nodes", ""),
    ("watch", "nodes", ""),
    ("create", "podtemplates", "default"),
    ("get", "secrets/kruise-manager-webhook-certs", "kruise-system"),
    ("watch", "secrets/kruise-manager-webhook-certs", "kruise-system"),
];

const WEBHOOK_MAY_NOT: &[Access] = &[
    ("watch", "pods", "default"),
    ("create", "persistentvolumeclaims", "default"),
    ("create", "pods", "default"),
    ("patch", "pods", "default"),
    ("delete", "pods", "default"),
    ("update", "podtemplates", "default"),
    ("delete", "podtemplates", "default"),
    ("get", "secrets", "default"),
    ("get", "secrets", "kruise-system"),
    ("list", "secrets", "kruise-daemon-config"),
    ("update", "secrets/kruise-manager-webhook-certs", "kruise-system"),
    ("create", "secrets", "kruise-system"),
    ("create", "events", "default"),
    (
        "get",
        "leases.coordination.k8s.io/kruise-manager",
        "kruise-system",
    ),
    ("get", "configmaps", "default"),
    ("patch", "clonesets.apps.kruise.io", "default"),
    ("list", "clonesets.apps.kruise.io", "default"),
    (
        "patch",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io/kruise-mutating-webhook-configuration",
        "",
    ),
    (
        "patch",
        "customresourcedefinitions.apiextensions.k8s.io/nodeimages.apps.kruise.io",
        "",
    ),
];

fn may(account: &str, (verb, resource, namespace): &Access) -> bool {
    let who = format!("--as=system:serviceaccount:kruise-system:{account}");
    let mut args = vec!["auth", "can-i", *verb];
    // kubectl means a name by what follows the slash, and has a flag for subresources; the names here have several words.
    let subresource;
    match resource.rsplit_once('/') {
        Some((resource, sub)) if !sub.contains(['-', '.']) => {
            subresource = format!("--subresource={sub}");
            args.extend([resource, subresource.as_str()]);
        }
        _ => args.push(resource),
    }
    let scope = if namespace.is_empty() {
        "--all-namespaces".into()
    } else {
        format!("--namespace={namespace}")
    };
    args.extend([scope.as_str(), who.as_str()]);
    // It says "no" with a failure.
    world()
        .plane
        .kubectl(&args)
        .is_ok_and(|said| said.trim() == "yes")
}

fn check(account: &str, allowed: &[Access], denied: &[Access]) {
    for access in allowed {
        assert!(may(account, access), "{account} may not {access:?}");
    }
    for access in denied {
        assert!(!may(account, access), "{account} may {access:?}");
    }
}

#[test]
fn the_daemon_has_what_it_needs_and_no_more() {
    check("kruise-daemon", DAEMON_MAY, DAEMON_MAY_NOT);
}

#[test]
fn the_manager_has_what_it_needs_and_no_more() {
    check("kruise-manager", MANAGER_MAY, MANAGER_MAY_NOT);
}

#[test]
fn the_webhooks_account_reads_what_reviews_need_and_writes_nothing_but_dry_runs() {
    check("kruise-webhook", WEBHOOK_MAY, WEBHOOK_MAY_NOT);
}
